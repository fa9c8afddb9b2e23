"""Objectives and the frontier, against looking at every pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.bill import Bill
from fsdpplan.search.bounds.fitting import needed_bytes
from fsdpplan.search.objective import (
    OBJECTIVES,
    Offer,
    best,
    frontier,
    leaner,
    meets,
    token_seconds,
)
from fsdpplan.search.question import ObjectiveName
from fsdpplan.search.rules.legality import in_pieces
from fsdpplan.search.space import Space
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Interval
from tests.cost.problems import SMALL
from tests.search.questions import Question, policies, question


def certain(value: float) -> Interval:
    """Without a band."""
    return Interval(lower=value, expected=value, upper=value)


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    """Of few values, so that there are equals."""
    few = st.integers(1, 6)
    gpus, rate, chance = 8 * draw(few), 100.0 * draw(few), draw(few) / 7
    hours = 1e9 / rate / 3600
    return Offer(
        gpus=gpus,
        tokens_per_second=rate,
        free_bytes=float(draw(few)),
        kept_fraction=draw(few) / 6,
        bill=Bill(
            gpus=gpus,
            steps=1,
            seconds=certain(hours * 3600),
            gpu_hours=certain(gpus * hours),
            cost=certain(2.0 * gpus * hours),
            energy_kwh=certain(draw(few) * hours),
            co2_kg=None,
            deadline_chance=chance,
        ),
    )


@given(st.lists(offers(), min_size=1, max_size=12), st.floats(0, 1))
def test_the_best_is_no_worse_than_any_that_ends_in_time(some: list[Offer], chance: float) -> None:
    able = [one for one in some if meets(one, chance)]
    for objective in OBJECTIVES.values():
        index = best(some, objective, chance=chance)
        assert (index is None) == (not able)
        if index is not None:
            assert meets(some[index], chance)
            assert all(objective.axis(some[index]) <= objective.axis(one) for one in able)


@given(st.lists(offers(), max_size=12))
def test_the_frontier_is_what_no_other_one_beats(some: list[Offer]) -> None:
    for objective in OBJECTIVES.values():
        points = [(objective.axis(one), objective.beside(one)) for one in some]

        def beaten(point: tuple[float, float], points: list[tuple[float, float]] = points) -> bool:
            return any(
                other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
            )

        kept = frontier(some, objective.axis, objective.beside)
        assert {points[index] for index in kept} == {one for one in points if not beaten(one)}
        assert len(kept) == len({points[index] for index in kept})
        assert [points[index][0] for index in kept] == sorted(points[index][0] for index in kept)


def test_every_objective_that_can_be_typed_is_there() -> None:
    assert set(OBJECTIVES) == set(get_args(ObjectiveName))
    assert token_seconds in {one.axis for one in OBJECTIVES.values()}


def every(asked: Question) -> list[Layout]:
    """All legal layouts with the usual settings: each way to recompute, the loss whole or not."""
    found = []
    for leaf in policies(asked):
        for mode in asked.asked.modes:
            whole = replace(leaf, activation_checkpointing=mode)
            pieces = in_pieces(whole, training=asked.training, pins=asked.pins)
            found += [one for one in (whole, pieces) if one is not None]
    space = Space(asked.asked)
    return [one for one in found if space.is_legal(one)]


@pytest.mark.parametrize("pins", [{"cp": 1, "pp": 1}, {"sharding": "fsdp", "tp": 1, "cp": 1}])
def test_the_last_has_the_most_memory_free_of_all(pins: dict[str, Any]) -> None:
    asked = question(SMALL, 4, seq_len=1024, global_batch=16, **pins)
    first = asked.answer()
    found = [first, *leaner(asked.asked, first)]
    peaks = [one.ranked[0].estimate.memory.peak_device_bytes for one in found]
    assert peaks == sorted(set(peaks), reverse=True)
    least = min(needed_bytes(asked.asked, one) for one in every(asked))
    assert peaks[-1] <= least
    steps = [one.fastest_seconds for one in found]
    assert steps == sorted(steps, key=lambda seconds: seconds or 0.0)
