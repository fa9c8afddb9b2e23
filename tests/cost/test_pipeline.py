"""Pipelines in time: bubbles, uneven stages, hand-over."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.pipeline import (
    PipelineTiming,
    ideal_bubble_fraction,
    simulate_pipeline,
    stage_blocks,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Schedule
from tests.cost.clusters import golden

TABLE = golden("pipeline")
PLAIN = st.sampled_from(["gpipe", "1f1b"])
TIMES = st.floats(0.1, 10)


def _timing(
    schedule: Schedule, forward: tuple[float, ...], num_microbatches: int, **changes: Any
) -> PipelineTiming:
    settings = {"virtual_stages": 1, "send_seconds": 0.0} | changes
    return simulate_pipeline(
        schedule=schedule,
        forward_seconds=forward,
        backward_seconds=tuple(2 * seconds for seconds in forward),
        num_microbatches=num_microbatches,
        **settings,
    )


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["claim"])
def test_worked_bubbles(row: dict[str, Any]) -> None:
    expected = float(Fraction(row["numerator"], row["denominator"]))
    pp, count, virtual = row["pp"], row["num_microbatches"], row["virtual_stages"]
    ideal = ideal_bubble_fraction(pp=pp, num_microbatches=count, virtual_stages=virtual)
    assert ideal == pytest.approx(expected, rel=TABLE["tolerance_fraction"])
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


@settings(max_examples=25)
@given(st.lists(st.floats(0.9, 1.1), min_size=4, max_size=4), st.sampled_from([0.0, 0.2]))
def test_the_extended_steady_state_is_that_of_the_whole_simulation(
    forward: list[float], send: float
) -> None:
    from fsdpplan.cost import pipeline

    count = 4 * 30
    extended = _timing("1f1b", tuple(forward), count, send_seconds=send).total_seconds
    rounds = pipeline._EXACT_ROUNDS
    try:
        pipeline._EXACT_ROUNDS = 100
        whole = _timing("1f1b", tuple(forward), count, send_seconds=send).total_seconds
    finally:
        pipeline._EXACT_ROUNDS = rounds
    assert extended == pytest.approx(whole, rel=0.02)


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


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_share_the_blocks_evenly(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(SpecError, match="do not fill"):
            stage_blocks(layers=layers, stages=stages)
        return
    blocks = stage_blocks(layers=layers, stages=stages)
    assert sum(blocks) == layers
    assert len(blocks) == stages
    assert max(blocks) - min(blocks) <= 1
    assert blocks[-1] == min(blocks)


def test_left_over_blocks_go_to_the_middle_first() -> None:
    assert stage_blocks(layers=34, stages=4) == (8, 9, 9, 8)
    assert stage_blocks(layers=35, stages=4) == (9, 9, 9, 8)


def test_times_that_do_not_fill_the_ranks_are_refused() -> None:
    with pytest.raises(SpecError, match="do not fill ranks"):
        _timing("interleaved_1f1b", (1.0, 1.0, 1.0), 4, virtual_stages=2)


def test_longer_pipelines_of_even_stages_have_larger_bubbles() -> None:
    bubbles = [_timing("1f1b", (1.0,) * pp, 16).bubble_fraction for pp in (1, 2, 4, 8, 16)]
    assert all(shorter < longer for shorter, longer in pairwise(bubbles))
