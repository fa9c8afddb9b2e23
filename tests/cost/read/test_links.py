"""Links are sold once: a step is no shorter than what passes any level of its network."""

from __future__ import annotations

import pytest
from hypothesis import given

from fsdpplan.cost.estimate import step_time
from fsdpplan.cost.read.exposed import level_seconds
from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.search.space import Space
from tests.benchmarks.links_of_mixtures import priced, sold_twice
from tests.cost.problems import Case, case, cases
from tests.cost.timeline.test_timeline import holds
from tests.cost.wide import wide_cases

ROUNDING = 1 + 1e-9


def no_link_is_sold_twice(of: Case) -> None:
    step = step_time(of)
    for seconds in level_seconds(step.communication).values():
        assert seconds <= step.time.total_seconds * ROUNDING
    for row in step.communication:
        assert row.exposed_seconds <= row.seconds * ROUNDING


@given(cases())
def test_no_link_of_what_is_searched_is_sold_twice(drawn: Case) -> None:
    no_link_is_sold_twice(drawn)


@given(wide_cases())
def test_nor_of_any_software_and_parallelism(drawn: Case) -> None:
    no_link_is_sold_twice(drawn)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(8))
def test_no_link_of_what_is_recommended_of_a_mixture_is_sold_twice(seed: int) -> None:
    _, estimate = next(iter(priced(seed)))
    assert not sold_twice(estimate)


EXCHANGING = case(
    "qwen2-57b-a14b",
    profile="gcp-g2-standard-96",
    seq_len=2048,
    dp_shard=128,
    ep=16,
    micro_batch=2,
    activation_checkpointing="full",
)
"""Experts on L4s: their exchange and FSDP's gathers meet on Ethernet."""


def test_what_waits_for_a_full_link_is_exposed_and_laid_out() -> None:
    step = step_time(EXCHANGING)
    passing = level_seconds(step.communication)
    assert step.queued_seconds > 0
    assert passing[step.full_level] == pytest.approx(step.time.total_seconds)
    waited = sum(row.exposed_seconds for row in step.communication)
    assert waited == pytest.approx(step.time.exposed_communication_seconds)
    timeline = step_timeline(EXCHANGING, detail="passes", detailed=1)
    names = [event.name for event in timeline.events]
    assert f"waits for {step.full_level}" in names
    holds(EXCHANGING, timeline)


def test_the_floor_of_a_layout_is_not_below_what_passes_a_link() -> None:
    asked = Question(
        model=EXCHANGING.model,
        cluster=EXCHANGING.cluster,
        training=EXCHANGING.training,
        pins=Pins(),
    )
    floor = Space(asked).floors.of_settled(EXCHANGING.layout)
    step = step_time(EXCHANGING)
    rows = [row for row in step.communication if row.collective != "all_reduce"]
    assert floor * ROUNDING >= max(level_seconds(tuple(rows)).values())
    assert floor <= step.time.total_seconds * ROUNDING
