"""Robust fits: known numbers come back from noisy rows, of which some are wrong."""

from __future__ import annotations

import random
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.validate.fit.robust import Numbers, Sought, robust_fit, robust_scale

SIZES = [4.0**power for power in range(12)]
SOUGHT = {
    "start": Sought(expected=1.0, spread=2.3, lowest=1e-6, highest=1e6),
    "rate": Sought(expected=1.0, spread=2.3, lowest=1e-6, highest=1e6),
}


def times(numbers: Numbers) -> list[float]:
    return [numbers["start"] + size / numbers["rate"] for size in SIZES]


@given(
    start=st.floats(10, 100), rate=st.floats(1, 1000), noise=st.floats(0, 0.03), seed=st.integers()
)
def test_known_numbers_come_back(start: float, rate: float, noise: float, seed: int) -> None:
    chance = random.Random(seed)
    measured = [one * exp(chance.gauss(0, noise)) for one in times({"start": start, "rate": rate})]
    found = robust_fit(times, measured, SOUGHT).numbers
    for name, true in (("start", start), ("rate", rate)):
        assert found[name].value == pytest.approx(true, rel=0.01 + 4 * noise)


def test_two_rows_of_twelve_that_are_far_off_bend_nothing() -> None:
    measured = times({"start": 5.0, "rate": 50.0})
    measured[3] *= 20
    measured[9] *= 4
    found = robust_fit(times, measured, SOUGHT)
    assert found.numbers["start"].value == pytest.approx(5.0, rel=0.01)
    assert found.numbers["rate"].value == pytest.approx(50.0, rel=0.01)


def test_a_number_that_no_row_tells_of_stays_with_the_error_that_it_had() -> None:
    sought = {**SOUGHT, "hidden": Sought(expected=7.0, spread=0.5, lowest=1.0, highest=9.0)}
    found = robust_fit(times, times({"start": 5.0, "rate": 50.0}), sought).numbers["hidden"]
    assert found.value == pytest.approx(7.0, rel=1e-6)
    assert found.error_fraction == pytest.approx(0.5, rel=1e-3)


def test_a_number_stays_within_its_limits() -> None:
    sought = {**SOUGHT, "rate": Sought(expected=1.0, spread=2.3, lowest=0.1, highest=20.0)}
    found = robust_fit(times, times({"start": 5.0, "rate": 50.0}), sought)
    assert found.numbers["rate"].value == pytest.approx(20.0)


def test_the_stated_errors_are_those_that_are_made() -> None:
    """Of 60 fits, about two thirds lie within one standard error."""
    inside = 0
    for seed in range(60):
        chance = random.Random(seed)
        noisy = [one * exp(chance.gauss(0, 0.05)) for one in times({"start": 5.0, "rate": 50.0})]
        found = robust_fit(times, noisy, SOUGHT).numbers["rate"]
        inside += abs(found.value / 50.0 - 1) <= found.error_fraction
    assert 30 <= inside <= 52


def test_weights_choose_between_rows_that_contradict_each_other() -> None:
    one = {"rate": Sought(expected=2.0, spread=2.3, lowest=0.1, highest=10.0)}
    for weights, nearer in (([9.0, 1.0], 1.0), ([1.0, 9.0], 4.0)):
        found = robust_fit(lambda n: [n["rate"]] * 2, [1.0, 4.0], one, weights=weights)
        assert abs(found.numbers["rate"].value - nearer) < 1.1


@given(st.lists(st.floats(-1, 1), min_size=5, max_size=40))
def test_scatter_ignores_where_the_middle_is(values: list[float]) -> None:
    moved = [value + 3.0 for value in values]
    assert robust_scale(moved) == pytest.approx(robust_scale(values), abs=1e-9)
