"""Pipelines played: bubbles, uneven stages, hand-over, gathers and reductions."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.play import pipeline as play
from fsdpplan.cost.play.pipeline import (
    PipelineTiming,
    operation_ends,
    played_in_full,
    played_pipeline,
)
from fsdpplan.cost.schedule.actions import PassOrder
from fsdpplan.cost.schedule.order import SIMULATED_SCHEDULES
from fsdpplan.cost.step.pipeline import SEND, WAITING_SCHEDULES, PipelineStep, pipeline_program
from fsdpplan.spec.layout import Schedule
from tests.cost.clusters import golden

TABLE = golden("pipeline")
ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
PLAIN = st.sampled_from(["gpipe", "1f1b"])
TIMES = st.floats(0.1, 10)


def _step(
    schedule: Schedule,
    forward: tuple[float, ...],
    num_microbatches: int,
    *,
    virtual_stages: int = 1,
    weight_share: float = 0.5,
    **changes: Any,
) -> PipelineStep:
    """Backward takes twice as long as forward, `weight_share` of it for the weights."""
    pp = len(forward) // virtual_stages
    return PipelineStep(
        order=PassOrder(schedule, pp, num_microbatches, virtual_stages),
        passes=tuple((seconds, 2 * seconds) for seconds in forward),
        weights=tuple(2 * seconds * weight_share for seconds in forward),
        **changes,
    )


def _timing(*asked: Any, **changes: Any) -> PipelineTiming:
    """That of such a step."""
    return played_pipeline(_step(*asked, **changes))


def ideal_bubble_fraction(*, pp: int, num_microbatches: int, virtual_stages: int) -> float:
    """(p - 1) / (v m + p - 1): Narayanan et al. (arXiv 2104.04473), as a share of the whole."""
    return (pp - 1) / (virtual_stages * num_microbatches + pp - 1)


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["claim"])
def test_worked_bubbles(row: dict[str, Any]) -> None:
    expected = float(Fraction(row["numerator"], row["denominator"]))
    pp, count, virtual = row["pp"], row["num_microbatches"], row["virtual_stages"]
    timing = _timing(row["schedule"], (1.0,) * (pp * virtual), count, virtual_stages=virtual)
    assert timing.bubble_fraction == pytest.approx(expected, rel=TABLE["tolerance_fraction"])


@given(PLAIN, st.integers(1, 9), st.integers(1, 300), TIMES)
def test_even_stages_reduce_to_the_closed_form(
    schedule: Schedule, pp: int, count: int, seconds: float
) -> None:
    timing = _timing(schedule, (seconds,) * pp, count)
    ideal = ideal_bubble_fraction(pp=pp, num_microbatches=count, virtual_stages=1)
    assert timing.bubble_fraction == pytest.approx(ideal, abs=1e-9)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_even_interleaved_stages_reduce_to_the_closed_form(
    pp: int, rounds: int, virtual: int
) -> None:
    timing = _timing(
        "interleaved_1f1b", (1.0,) * (pp * virtual), rounds * pp, virtual_stages=virtual
    )
    ideal = ideal_bubble_fraction(pp=pp, num_microbatches=rounds * pp, virtual_stages=virtual)
    assert timing.bubble_fraction == pytest.approx(ideal, abs=1e-9)


@given(PLAIN, st.lists(TIMES, min_size=2, max_size=6), st.integers(1, 40))
def test_bubble_is_a_fraction_and_falls_with_micro_batches(
    schedule: Schedule, forward: list[float], count: int
) -> None:
    fewer = _timing(schedule, tuple(forward), count).bubble_fraction
    more = _timing(schedule, tuple(forward), count + 1).bubble_fraction
    assert 0 <= more < 1
    assert more <= fewer + 1e-9


@given(PLAIN, st.lists(TIMES, min_size=1, max_size=6), st.integers(1, 40), st.floats(0, 1))
def test_no_pipeline_beats_its_busiest_rank_or_its_longest_path(
    schedule: Schedule, forward: list[float], count: int, send: float
) -> None:
    timing = _timing(schedule, tuple(forward), count, send=send)
    path = 3 * sum(forward) + 2 * (len(forward) - 1) * send
    assert timing.total_seconds >= max(timing.busy_seconds) * (1 - 1e-9)
    assert timing.total_seconds >= path * (1 - 1e-9)
    assert timing.busy_seconds == pytest.approx([3 * count * f for f in forward])


@given(PLAIN, st.lists(TIMES, min_size=2, max_size=5), st.integers(1, 20), st.floats(0, 1))
def test_slower_hand_over_is_never_faster(
    schedule: Schedule, forward: list[float], count: int, send: float
) -> None:
    free = _timing(schedule, tuple(forward), count).total_seconds
    slow = _timing(schedule, tuple(forward), count, send=send).total_seconds
    assert slow >= free * (1 - 1e-12)


@given(
    st.sampled_from(SIMULATED_SCHEDULES),
    st.integers(1, 5),
    st.lists(st.one_of(st.just(1.0), st.floats(0.2, 3)), min_size=15, max_size=15),
    st.sampled_from([0.0, 0.05, 2.0]),
    st.integers(0, 3),
)
def test_the_extended_steady_state_is_that_of_the_whole_simulation(
    schedule: Schedule, pp: int, seconds: list[float], send: float, odd: int
) -> None:
    """To rounding, however little or much the stages differ."""
    virtual = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}.get(schedule, 3)
    count = 40 * pp + (odd if schedule not in ROUNDS else 0)
    stages = tuple(seconds[: pp * virtual])
    extended = _timing(schedule, stages, count, virtual_stages=virtual, send=send)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "FIRST_ROUNDS", 1000)
        play.pass_ends.cache_clear()
        whole = _timing(schedule, stages, count, virtual_stages=virtual, send=send)
    play.pass_ends.cache_clear()
    assert extended.end_seconds == pytest.approx(whole.end_seconds, rel=1e-9)
    assert extended.stage_end_seconds == pytest.approx(whole.stage_end_seconds, rel=1e-9)


@pytest.mark.parametrize("row", TABLE["zero_bubbles"], ids=lambda row: row["claim"])
def test_weights_fill_the_bubble(row: dict[str, Any]) -> None:
    each = 1 / row["virtual_stages"]
    stages = (each,) * (row["pp"] * row["virtual_stages"])
    timing = _timing(
        row["schedule"],
        stages,
        row["num_microbatches"],
        virtual_stages=row["virtual_stages"],
    )
    assert timing.bubble_seconds == pytest.approx(row["bubble_units"], abs=1e-9)


@given(st.integers(2, 8), st.integers(2, 8), st.floats(0.2, 1))
def test_split_backward_passes_wait_less(pp: int, rounds: int, weights: float) -> None:
    """Whatever the share of the weights' half, as long as stages are even."""
    count, stages = rounds * pp, (1.0,) * (2 * pp)
    looped = {"virtual_stages": 2, "weight_share": weights / 2}
    plain = _timing("interleaved_1f1b", stages, count, virtual_stages=2)
    split = _timing("interleaved_zero_bubble", stages, count, **looped)
    assert split.bubble_seconds <= plain.bubble_seconds + 1e-9


@given(
    st.sampled_from(SIMULATED_SCHEDULES),
    st.integers(2, 4),
    st.lists(TIMES, min_size=8, max_size=8),
    st.integers(1, 5),
    st.floats(0, 2),
)
def test_no_schedule_beats_its_busiest_rank_or_its_longest_path(
    schedule: Schedule, pp: int, seconds: list[float], rounds: int, send: float
) -> None:
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    stages = tuple(seconds[: pp * virtual])
    timing = _timing(schedule, stages, 2 * rounds * pp, virtual_stages=virtual, send=send)
    hops = 2 * (len(stages) - 1 - (schedule in ("zbv", "dualpipev")))
    path = sum(stages) * 2 + hops * send  # forward, and the half of backward that is waited for
    assert timing.total_seconds >= path * (1 - 1e-9)
    assert timing.total_seconds >= max(timing.busy_seconds) * (1 - 1e-9)
    assert timing.total_seconds == max(timing.end_seconds) >= max(timing.stage_end_seconds)
    assert sum(timing.busy_seconds) == pytest.approx(6 * rounds * pp * sum(stages))
    assert min(timing.idle_seconds) == timing.bubble_seconds


@given(
    st.sampled_from(SIMULATED_SCHEDULES),
    st.integers(2, 4),
    st.lists(TIMES, min_size=8, max_size=8),
    st.floats(0, 2),
    st.floats(0, 2),
)
def test_slower_messages_are_never_faster(
    schedule: Schedule, pp: int, seconds: list[float], send: float, more: float
) -> None:
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    stages = tuple(seconds[: pp * virtual])
    ends = [
        _timing(schedule, stages, 4 * pp, virtual_stages=virtual, send=hop).end_seconds
        for hop in (send, send + more)
    ]
    assert all(slow >= fast - 1e-9 for fast, slow in zip(*ends, strict=True))


@given(st.integers(3, 7), st.integers(4, 12), st.floats(0.01, 0.3))
def test_one_f_one_b_waits_for_both_messages_of_a_micro_batch(
    pp: int, rounds: int, send: float
) -> None:
    """A rank between two others receives one each way: each micro-batch is slower by both."""
    fewer, more = (
        _timing("1f1b", (1.0,) * pp, count, send=send).total_seconds
        for count in (rounds * pp, (rounds + 1) * pp)
    )
    assert more - fewer == pytest.approx(pp * (3 + 2 * send))


def test_messages_wait_for_the_link() -> None:
    """Where a message takes longer than the passes, it sets the pace."""
    stages, count = (0.5,) * 8, 40
    timing = _timing("interleaved_1f1b", stages, count, virtual_stages=2, send=4.0)
    assert timing.total_seconds > 2 * count * 4.0


def test_a_gather_beside_the_first_pass_hides_where_it_is_no_longer() -> None:
    stages, count = (1.0,) * 4, 16
    free = _timing("1f1b", stages, count).total_seconds
    inside = {"gathering": "in passes"}
    hidden = _timing("1f1b", stages, count, gathers=(1.0,) * 4, **inside)
    exposed = _timing("1f1b", stages, count, gathers=(1.5, 1.0, 1.0, 1.25), **inside)
    assert hidden.total_seconds == pytest.approx(free)
    assert exposed.total_seconds == pytest.approx(free + 0.75)


def test_gathers_ahead_are_done_while_a_rank_waits_for_its_input() -> None:
    """Ranks gather 3 s for each of two stages; 0 and 2 are on the first, messages take 0.5 s."""
    ahead = {"virtual_stages": 2, "gathering": "ahead", "gathers": (3.0,) * 4, "send": 0.5}
    step = _step("interleaved_1f1b", (1.0,) * 4, 4, **ahead)
    ends = {
        one.action[0]: one.end
        for passes in played_in_full(step)
        for one in passes
        if one.gathering is not None
    }
    assert ends == {0: 4.0, 1: 5.5, 2: 7.0, 3: 8.5}


def test_a_stage_is_handed_the_output_of_one_on_its_rank_without_a_message() -> None:
    """Stages 1 and 2 of a V are on the last rank: a forward pass is through after two messages."""
    asked = {"virtual_stages": 2, "gathering": "ahead", "gathers": (0.0,) * 4, "send": 0.5}
    first = {
        one.action[0]: one.end
        for passes in played_in_full(_step("zbv", (1.0,) * 4, 4, **asked))
        for one in passes
        if one.gathering is not None
    }
    assert (first[0], first[1], first[2]) == (1.0, 2.5, 3.5)
    assert first[3] >= 5.0


@given(
    st.sampled_from(SIMULATED_SCHEDULES),
    st.integers(2, 4),
    st.sampled_from(["", "in passes", "ahead", "beside"]),
)
def test_operations_come_behind_what_they_wait_for_and_messages_are_those_between_ranks(
    schedule: Schedule, pp: int, gathering: str
) -> None:
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    count, stages = 2 * pp, pp * virtual
    changes = {"virtual_stages": virtual, "gathering": gathering, "send": 0.1}
    step = _step(schedule, (1.0,) * stages, count, **changes)
    program = pipeline_program(step.shape)
    ends = operation_ends(program, step.seconds)
    for number, (stream, at, after) in enumerate(program.ops, start=1):
        assert after < number
        assert ends[number] >= ends[after] + step.seconds[at]
        assert 0 <= stream < 4 * pp
    turns = sum(
        len({r for r in range(pp) if {s, s + 1} <= set(step.order.held(r))})
        for s in range(stages - 1)
    )
    sent = [stream for stream, at, _ in program.ops if at == SEND]
    assert len(sent) == 2 * count * (stages - 1 - turns)
    assert all((stream < pp) == (schedule in WAITING_SCHEDULES) for stream in sent)


def test_reductions_of_later_ranks_hide_in_their_wait() -> None:
    """The first rank ends last: only what it reduces is waited for, unless another's is longer."""
    stages = (1.0,) * 4
    timing = _timing("1f1b", stages, 16, reductions=(1.0, 3.0, 3.0, 3.0))
    assert list(timing.end_seconds) == sorted(timing.end_seconds, reverse=True)
    assert timing.reducing_seconds == pytest.approx(1.0)
    beside = _timing("1f1b", stages, 16, reductions=(1.0,) * 4, hidden=(0.75,) * 4)
    assert beside.reducing_seconds == pytest.approx(0.25)


def test_a_rank_reduces_its_stages_as_they_end() -> None:
    looped = {"virtual_stages": 2, "reductions": (1.0,) * 4}
    timing = _timing("interleaved_1f1b", (1.0,) * 4, 4, **looped)
    first, last = timing.stage_end_seconds[0], timing.stage_end_seconds[2]
    assert last < first
    assert timing.reduced_seconds[0] == pytest.approx(max(first, last + 1.0) + 1.0)
    behind = _timing("interleaved_1f1b", (1.0,) * 4, 4, reduces_at_the_end=True, **looped)
    assert behind.reduced_seconds[0] == pytest.approx(timing.end_seconds[0] + 2.0)


@given(
    st.sampled_from(SIMULATED_SCHEDULES), st.integers(2, 4), st.lists(TIMES, min_size=8, max_size=8)
)
def test_the_whole_play_ends_as_the_extended_one(
    schedule: Schedule, pp: int, seconds: list[float]
) -> None:
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    step = _step(
        schedule, tuple(seconds[: pp * virtual]), 10 * pp, virtual_stages=virtual, send=0.2
    )
    timing = played_pipeline(step)
    whole = played_in_full(step)
    assert [passes[-1].end for passes in whole] == pytest.approx(timing.end_seconds, rel=1e-9)
    busy = [sum(one.seconds for one in passes) for passes in whole]
    assert busy == pytest.approx(timing.busy_seconds)


def test_a_heavy_last_stage_sets_the_pace() -> None:
    timing = _timing("1f1b", (1.0, 1.0, 1.0, 2.0), 64)
    assert timing.total_seconds == pytest.approx(64 * 6.0 + 3 * 3.0)


def test_interleaving_pays_for_more_hand_overs() -> None:
    even = (1.0,) * 8
    one = _timing("1f1b", even, 8, send=0.3).total_seconds
    halves = _timing("interleaved_1f1b", (0.5,) * 16, 8, virtual_stages=2).total_seconds
    costly = _timing("interleaved_1f1b", (0.5,) * 16, 8, virtual_stages=2, send=0.3).total_seconds
    assert halves < one
    assert costly - halves > 0.3 * 2 * 7


def test_longer_pipelines_of_even_stages_have_larger_bubbles() -> None:
    bubbles = [_timing("1f1b", (1.0,) * pp, 16).bubble_fraction for pp in (1, 2, 4, 8, 16)]
    assert all(shorter < longer for shorter, longer in pairwise(bubbles))
