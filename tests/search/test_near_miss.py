"""Near misses: what is faster and hardly less sure to fit."""

from __future__ import annotations

from dataclasses import replace
from math import floor

import pytest

from fsdpplan.search.question import Question, SearchResult
from fsdpplan.search.recommend import NEAR_MISS_GAIN, NEAR_MISS_ODDS, near_miss, recommend
from tests.search.questions import question

ASKED = {
    "14b on cards": question("qwen2.5-14b", 4, "pcie-8xrtx4090", global_batch=64),
    "8b on cards": question("llama-3.1-8b", 8, "pcie-8xrtx4090", global_batch=64),
    "8b on a small card": question("llama-3.2-3b", 2, "pcie-8xrtx4090", global_batch=32),
    "13b on 40 GB": question("llama-2-13b", 8, "p4d-24xlarge", global_batch=128),
    "12 B of vocabulary": question("gemma-2-9b", 4, "pcie-8xl40s", global_batch=64),
}


def found(asked: Question, fits_fraction: float | None = None) -> SearchResult:
    training = asked.training
    if fits_fraction is not None:
        training = replace(training, fits_fraction=fits_fraction)
    return recommend(model=asked.model, cluster=asked.cluster, training=training, pins=asked.pins)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ASKED)
def test_a_near_miss_is_faster_hardly_less_sure_and_planned_by_its_chance(name: str) -> None:
    asked = ASKED[name].asked
    sure = found(asked)
    near = near_miss(asked, sure)
    assert sure.fastest_seconds is not None
    least = 1 - NEAR_MISS_ODDS * (1 - asked.training.fits_fraction)
    looser = found(asked, least).fastest_seconds
    assert looser is not None
    most = sure.fastest_seconds / (1 + NEAR_MISS_GAIN)
    if near is None:
        assert looser >= most * (1 - 1e-9)
        return
    chance = near.estimate.memory.fits_fraction
    assert chance is not None
    assert least <= chance < asked.training.fits_fraction
    step = near.estimate.step_seconds.expected
    assert step < most
    assert near.faster_fraction == pytest.approx(sure.fastest_seconds / step - 1)
    planned = found(asked, floor(100 * chance) / 100).fastest_seconds
    assert planned is not None
    assert planned <= step * (1 + 1e-9)


def test_who_asks_for_an_even_chance_is_told_of_none() -> None:
    asked = ASKED["14b on cards"].asked
    even = replace(asked, training=replace(asked.training, fits_fraction=0.5))
    assert near_miss(even, found(even)) is None
