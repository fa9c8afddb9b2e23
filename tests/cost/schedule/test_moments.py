"""What a pipeline rank holds follows from what it does, action by action."""

from __future__ import annotations

from itertools import chain
from typing import get_args

from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.schedule.actions import PassOrder
from fsdpplan.cost.schedule.moments import (
    Kind,
    Moment,
    Moments,
    all_at_once,
    highest,
    moments_of_rank,
)
from fsdpplan.cost.schedule.order import (
    SIMULATED_SCHEDULES,
    microbatches_refusal,
    moments_of,
    peak_in_flight,
    rank_actions,
)
from fsdpplan.spec.layout import Schedule

SINGLE = ("gpipe", "1f1b")
IN_V = ("zbv", "dualpipev")


def rank_moments(
    *,
    schedule: Schedule,
    pp: int,
    num_microbatches: int,
    stage_weights: tuple[int, ...],
    kept_weights: tuple[int, ...] = (),
) -> tuple[Moments, ...]:
    """`moments_of` each rank."""
    order = PassOrder(schedule, pp, num_microbatches, len(stage_weights) // pp)
    return tuple(moments_of(order, rank, stage_weights, kept_weights) for rank in range(pp))


def of(moments: Moments, *kinds: Kind) -> list[Moment]:
    """Those of some kinds."""
    return [moment for moment in moments if moment.kind in kinds]


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
    alive = peak_in_flight(PassOrder(**shape, virtual_stages=virtual), stage_weights=blocks)  # type: ignore[arg-type]
    every = rank_moments(**shape, stage_weights=blocks)  # type: ignore[arg-type]
    for rank, moments in enumerate(every):
        held = PassOrder(schedule, pp, 0, virtual).held(rank)
        most = sum(count * blocks[stage] for count, stage in zip(alive[rank], held, strict=True))
        assert max(moment.alive for moment in of(moments, "forward")) == most
        all_blocks = sum(blocks[stage] for stage in held)
        assert all(moment.alive <= most for moment in moments)
        for moment in of(moments, "forward", "backward", "after", "after all losses", "reduction"):
            assert moment.graded + moment.first + moment.reduced <= all_blocks
        # in the end everything is reduced
        assert max(moment.reduced for moment in of(moments, "reduction")) < all_blocks
        assert bool(of(moments, "loss")) == (len(blocks) - 1 in held)
        assert bool(of(moments, "embedding")) == (0 in held)


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
        assert max(m.alive for m in of(one, "forward")) <= max(
            m.alive for m in of(other, "forward")
        )


def test_what_another_moment_reaches_in_all_is_left_out() -> None:
    one, other = all_at_once(alive=4, blocks=2), all_at_once(alive=6, blocks=2)
    assert of(highest([*one, *other]), "forward") == [Moment("forward", 6, 2, ends=2)]
    apart = of(highest([*all_at_once(alive=6, blocks=1), *one]), "forward")
    assert set(apart) == {Moment("forward", 6, 1, ends=2), Moment("forward", 4, 2, ends=2)}


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
        most = of(one, "forward", "forward of kept")
        assert max(m.kept for m in most) == max(m.alive for m in of(own, "forward"))
        assert max(m.alive for m in most) == max(m.alive for m in of(whole, "forward"))
        assert all(m.kept <= m.alive for m in one)


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
        assert (
            bool(of(one, "forward of kept")) == bool(of(one, "backward of kept")) == bool(keeping)
        )
        if keeping:
            most = max(moment.kept for moment in of(one, "backward of kept"))
            assert max(moment.kept for moment in of(one, "backward")) == most - keeping


def test_nothing_kept_is_as_all_that_recompute() -> None:
    shape = {"schedule": "1f1b", "pp": 2, "num_microbatches": 4, "stage_weights": (3, 2)}
    plain = rank_moments(**shape)  # type: ignore[arg-type]
    assert rank_moments(**shape, kept_weights=(0, 0)) == plain  # type: ignore[arg-type]


@given(pipelines())
def test_moments_of_the_shortened_list_are_those_of_all_actions(
    pipeline: tuple[Schedule, int, int, tuple[int, ...]],
) -> None:
    """What decides the peak: alive and graded of each kind, over every action of the step."""
    schedule, pp, number, blocks = pipeline
    shape = {"schedule": schedule, "pp": pp, "num_microbatches": number}
    lists = rank_actions(PassOrder(**shape, virtual_stages=len(blocks) // pp))  # type: ignore[arg-type]
    for todo, moments in zip(lists, rank_moments(**shape, stage_weights=blocks), strict=True):  # type: ignore[arg-type]
        each = list(moments_of_rank(todo, blocks))
        assert len(each) == len(todo)
        whole = highest(chain.from_iterable(each))
        for name in ("alive", "graded", "reduced"):
            for kind in get_args(Kind):
                found, every = of(moments, kind), of(whole, kind)
                assert bool(found) == bool(every)
                if found:
                    one, other = (max(getattr(m, name) for m in ms) for ms in (found, every))
                    assert one == other, (kind, name)
