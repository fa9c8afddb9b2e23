"""What a pipeline rank holds follows from what it does, action by action."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.schedule.actions import rank_stages
from fsdpplan.cost.schedule.moments import Moment, Moments, all_at_once, joined
from fsdpplan.cost.schedule.order import (
    SIMULATED_SCHEDULES,
    microbatches_refusal,
    moments_of,
    peak_in_flight,
)
from fsdpplan.spec.layout import Schedule

SINGLE = ("gpipe", "1f1b")
IN_V = ("zbv", "dualpipev")


def rank_moments(*, pp: int, **shape: Any) -> tuple[Moments, ...]:
    """`moments_of` each rank."""
    return tuple(moments_of(rank, pp=pp, **shape) for rank in range(pp))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, int, int, tuple[int, ...]]:
    """(schedule, pp, micro-batches, blocks of each stage)."""
    schedule = draw(st.sampled_from(SIMULATED_SCHEDULES))
    pp, number = draw(st.integers(2, 4)), draw(st.integers(1, 12))
    refusal = microbatches_refusal(schedule=schedule, pp=pp, num_microbatches=number)
    assume(refusal is None)
    virtual = 1 if schedule in SINGLE else 2 if schedule in IN_V else draw(st.integers(2, 3))
    blocks = draw(st.lists(st.integers(1, 4), min_size=pp * virtual, max_size=pp * virtual))
    return schedule, pp, number, tuple(blocks)


@given(pipelines())
def test_the_most_in_flight_is_a_moment_and_no_moment_has_more(
    pipeline: tuple[Schedule, int, int, tuple[int, ...]],
) -> None:
    schedule, pp, number, blocks = pipeline
    shape = {"schedule": schedule, "pp": pp, "num_microbatches": number}
    virtual = len(blocks) // pp
    alive = peak_in_flight(**shape, virtual_stages=virtual, stage_weights=blocks)  # type: ignore[arg-type]
    every = rank_moments(**shape, stage_weights=blocks)  # type: ignore[arg-type]
    for rank, moments in enumerate(every):
        held = rank_stages(schedule=schedule, pp=pp, virtual_stages=virtual, rank=rank)
        most = sum(count * blocks[stage] for count, stage in zip(alive[rank], held, strict=True))
        assert max(moment.alive for moment in moments.forward) == most
        all_blocks = sum(blocks[stage] for stage in held)
        for moment in (*moments.forward, *moments.backward, *moments.after, *moments.reduction):
            assert moment.alive <= most
            assert moment.graded + moment.first + moment.reduced <= all_blocks
        # in the end everything is reduced
        assert max(moment.reduced for moment in moments.reduction) < all_blocks
        assert bool(moments.loss) == (len(blocks) - 1 in held)
        assert bool(moments.embedding) == (0 in held)


@given(pipelines())
def test_more_micro_batches_never_hold_less(
    pipeline: tuple[Schedule, int, int, tuple[int, ...]],
) -> None:
    schedule, pp, number, blocks = pipeline
    more = number + pp
    assume(microbatches_refusal(schedule=schedule, pp=pp, num_microbatches=more) is None)
    # rounds of several stages are as long as their number divides: 5 micro-batches over 3 ranks are
    # one round of 5, and 8 are two of 4
    assume(number < pp or number % pp == 0)
    few = rank_moments(schedule=schedule, pp=pp, num_microbatches=number, stage_weights=blocks)
    many = rank_moments(schedule=schedule, pp=pp, num_microbatches=more, stage_weights=blocks)
    for one, other in zip(few, many, strict=True):
        assert max(m.alive for m in one.forward) <= max(m.alive for m in other.forward)


def test_what_another_moment_reaches_in_all_is_left_out() -> None:
    one, other = all_at_once(alive=4, blocks=2), all_at_once(alive=6, blocks=2)
    assert joined([one, other]).forward == (Moment(6, 2, ends=2),)
    apart = joined([all_at_once(alive=6, blocks=1), one])
    assert set(apart.forward) == {Moment(6, 1, ends=2), Moment(4, 2, ends=2)}


@given(pipelines(), st.integers(1, 3))
def test_blocks_that_keep_everything_are_alive_as_in_a_pipeline_of_them_alone(
    pipeline: tuple[Schedule, int, int, tuple[int, ...]], recomputed: int
) -> None:
    schedule, pp, number, blocks = pipeline
    kept = tuple(max(0, own - recomputed) for own in blocks)
    shape = {"schedule": schedule, "pp": pp, "num_microbatches": number}
    both = rank_moments(**shape, stage_weights=blocks, kept_weights=kept)  # type: ignore[arg-type]
    alone = rank_moments(**shape, stage_weights=kept)  # type: ignore[arg-type]
    every = rank_moments(**shape, stage_weights=blocks)  # type: ignore[arg-type]
    for one, own, whole in zip(both, alone, every, strict=True):
        most = (*one.forward, *one.forward_kept)
        assert max(m.kept for m in most) == max(m.alive for m in own.forward)
        assert max(m.alive for m in most) == max(m.alive for m in whole.forward)
        assert all(m.kept <= m.alive for m in (*most, *one.backward, *one.backward_kept))


@given(pipelines(), st.integers(1, 3))
def test_when_a_pass_recomputes_what_its_stage_kept_is_gone(
    pipeline: tuple[Schedule, int, int, tuple[int, ...]], recomputed: int
) -> None:
    schedule, pp, number, blocks = pipeline
    assume(schedule in SINGLE)
    kept = tuple(max(0, own - recomputed) for own in blocks)
    every = rank_moments(
        schedule=schedule,
        pp=pp,
        num_microbatches=number,
        stage_weights=blocks,
        kept_weights=kept,
    )
    for one, keeping in zip(every, kept, strict=True):
        assert bool(one.forward_kept) == bool(one.backward_kept) == bool(keeping)
        if keeping:
            most = max(moment.kept for moment in one.backward_kept)
            assert max(moment.kept for moment in one.backward) == most - keeping


def test_nothing_kept_is_as_all_that_recompute() -> None:
    shape = {"schedule": "1f1b", "pp": 2, "num_microbatches": 4, "stage_weights": (3, 2)}
    plain = rank_moments(**shape)  # type: ignore[arg-type]
    assert rank_moments(**shape, kept_weights=(0, 0)) == plain  # type: ignore[arg-type]
