"""Pipelines in time: bubbles, uneven stages, hand-over."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.schedule import simulation as pipeline_simulation
from fsdpplan.cost.schedule.order import SIMULATED_SCHEDULES
from fsdpplan.cost.schedule.times import (
    PipelineTiming,
    reduced_seconds,
    simulate_pipeline,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Schedule
from tests.cost.clusters import golden

TABLE = golden("pipeline")
ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
PLAIN = st.sampled_from(["gpipe", "1f1b"])
TIMES = st.floats(0.1, 10)


def _timing(
    schedule: Schedule,
    forward: tuple[float, ...],
    num_microbatches: int,
    *,
    weight_share: float = 0.5,
    **changes: Any,
) -> PipelineTiming:
    """Backward takes twice as long as forward, `weight_share` of it for the weights."""
    settings = {
        "virtual_stages": 1,
        "send_seconds": 0.0,
        "backward_weight_seconds": tuple(2 * seconds * weight_share for seconds in forward),
    } | changes
    return simulate_pipeline(
        schedule=schedule,
        forward_seconds=forward,
        backward_seconds=tuple(2 * seconds for seconds in forward),
        num_microbatches=num_microbatches,
        **settings,
    )


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
    timing = _timing(schedule, tuple(forward), count, send_seconds=send)
    path = 3 * sum(forward) + 2 * (len(forward) - 1) * send
    assert timing.total_seconds >= max(timing.busy_seconds) * (1 - 1e-9)
    assert timing.total_seconds >= path * (1 - 1e-9)
    assert timing.busy_seconds == pytest.approx([3 * count * f for f in forward])


@given(PLAIN, st.lists(TIMES, min_size=2, max_size=5), st.integers(1, 20), st.floats(0, 1))
def test_slower_hand_over_is_never_faster(
    schedule: Schedule, forward: list[float], count: int, send: float
) -> None:
    free = _timing(schedule, tuple(forward), count).total_seconds
    slow = _timing(schedule, tuple(forward), count, send_seconds=send).total_seconds
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
    extended = _timing(schedule, stages, count, virtual_stages=virtual, send_seconds=send)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_simulation, "FIRST_ROUNDS", 1000)
        whole = _timing(schedule, stages, count, virtual_stages=virtual, send_seconds=send)
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
    timing = _timing(schedule, stages, 2 * rounds * pp, virtual_stages=virtual, send_seconds=send)
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
        _timing(schedule, stages, 4 * pp, virtual_stages=virtual, send_seconds=hop).end_seconds
        for hop in (send, send + more)
    ]
    assert all(slow >= fast - 1e-9 for fast, slow in zip(*ends, strict=True))


@given(st.integers(3, 7), st.integers(4, 12), st.floats(0.01, 0.3))
def test_one_f_one_b_waits_for_both_messages_of_a_micro_batch(
    pp: int, rounds: int, send: float
) -> None:
    """A rank between two others receives one each way: each micro-batch is slower by both."""
    fewer, more = (
        _timing("1f1b", (1.0,) * pp, count, send_seconds=send).total_seconds
        for count in (rounds * pp, (rounds + 1) * pp)
    )
    assert more - fewer == pytest.approx(pp * (3 + 2 * send))


def test_messages_wait_for_the_link() -> None:
    """Where a message takes longer than the passes, it sets the pace."""
    stages, count = (0.5,) * 8, 40
    timing = _timing("interleaved_1f1b", stages, count, virtual_stages=2, send_seconds=4.0)
    assert timing.total_seconds > 2 * count * 4.0


def test_a_gather_before_the_first_pass_hides_where_a_rank_waits_anyway() -> None:
    stages, count = (1.0,) * 4, 16
    free = _timing("1f1b", stages, count).total_seconds
    hidden = _timing("1f1b", stages, count, gathered_seconds=(1.0, 2.0, 3.0, 4.0))
    exposed = _timing("1f1b", stages, count, gathered_seconds=(1.5, 2.0, 3.0, 4.0))
    assert hidden.total_seconds == pytest.approx(free)
    assert exposed.total_seconds == pytest.approx(free + 0.5)


def test_reductions_of_later_ranks_hide_in_their_wait() -> None:
    """The first rank ends last: only what it reduces is waited for, unless another's is longer."""
    timing = _timing("1f1b", (1.0,) * 4, 16)
    assert list(timing.end_seconds) == sorted(timing.end_seconds, reverse=True)
    held = ((0,), (1,), (2,), (3,))
    ends = reduced_seconds(
        timing=timing, rank_stage_indices=held, reduce_seconds=(1.0, 3.0, 3.0, 3.0)
    )
    assert max(ends) == pytest.approx(timing.total_seconds + 1.0)
    beside = reduced_seconds(
        timing=timing,
        rank_stage_indices=held,
        reduce_seconds=(1.0, 1.0, 1.0, 1.0),
        hidden_seconds=(0.75, 0.75, 0.75, 0.75),
    )
    assert max(beside) == pytest.approx(timing.total_seconds + 0.25)


def test_a_rank_reduces_its_stages_as_they_end() -> None:
    timing = _timing("interleaved_1f1b", (1.0,) * 4, 4, virtual_stages=2)
    first, last = timing.stage_end_seconds[0], timing.stage_end_seconds[2]
    assert last < first
    ends = reduced_seconds(
        timing=timing, rank_stage_indices=((0, 2), (1, 3)), reduce_seconds=(1.0, 1.0, 1.0, 1.0)
    )
    assert ends[0] == pytest.approx(max(first, last + 1.0) + 1.0)


def test_a_heavy_last_stage_sets_the_pace() -> None:
    timing = _timing("1f1b", (1.0, 1.0, 1.0, 2.0), 64)
    assert timing.total_seconds == pytest.approx(64 * 6.0 + 3 * 3.0)


def test_interleaving_pays_for_more_hand_overs() -> None:
    even = (1.0,) * 8
    one = _timing("1f1b", even, 8, send_seconds=0.3).total_seconds
    halves = _timing("interleaved_1f1b", (0.5,) * 16, 8, virtual_stages=2).total_seconds
    costly = _timing(
        "interleaved_1f1b", (0.5,) * 16, 8, virtual_stages=2, send_seconds=0.3
    ).total_seconds
    assert halves < one
    assert costly - halves > 0.3 * 2 * 7


def test_times_that_do_not_fill_the_ranks_are_refused() -> None:
    with pytest.raises(SpecError, match="do not fill ranks"):
        _timing("interleaved_1f1b", (1.0, 1.0, 1.0), 4, virtual_stages=2)


def test_halves_that_are_missing_or_too_long_are_refused() -> None:
    with pytest.raises(SpecError, match="splits the backward pass"):
        _timing("zbv", (1.0,) * 4, 4, virtual_stages=2, backward_weight_seconds=())
    with pytest.raises(SpecError, match="longer than the whole"):
        _timing("zbv", (1.0,) * 4, 4, virtual_stages=2, weight_share=1.1)
    with pytest.raises(SpecError, match="one a stage"):
        _timing("1f1b", (1.0,) * 4, 4, gathered_seconds=(1.0,))


def test_longer_pipelines_of_even_stages_have_larger_bubbles() -> None:
    bubbles = [_timing("1f1b", (1.0,) * pp, 16).bubble_fraction for pp in (1, 2, 4, 8, 16)]
    assert all(shorter < longer for shorter, longer in pairwise(bubbles))
