"""Recommended plans pass their own rehearsal; `make rehearse-many` tries a hundred of them."""

from __future__ import annotations

import pytest

from tests.benchmarks.rehearse_many import PEAK_ERROR_FRACTION, plans, problems_of

SEED = 2
NUMBER = 6
MOST_LAYERS = 4
"""So that six take a minute; `make rehearse-many` has up to 16."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(NUMBER))
def test_what_is_recommended_passes_its_rehearsal(number: int) -> None:
    _, plan = next(iter(plans(SEED + number, MOST_LAYERS)))
    assert problems_of(plan) == ()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(NUMBER))
def test_a_peak_is_rehearsed_as_predicted_whatever_the_wrap(number: int) -> None:
    _, plan = next(iter(plans(SEED + number, 2 * MOST_LAYERS, wraps=True)))
    assert problems_of(plan, peak_error=PEAK_ERROR_FRACTION) == ()
