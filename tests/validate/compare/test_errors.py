"""Errors count what they say, and the interval score punishes width and misses alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.validate.compare.errors import PENALTY, errors_over, mean_errors, percentile
from tests.validate.made import made


def test_errors_of_known_rows() -> None:
    errors = errors_over([made(1.0, 1.1), made(1.0, 0.7), made(2.0, 2.0)])
    assert errors is not None
    assert errors.median_abs_error_fraction == pytest.approx(0.1)
    assert errors.mean_abs_error_fraction == pytest.approx(0.4 / 3)
    assert errors.bias_fraction == pytest.approx(-0.2 / 3)
    assert errors.coverage_fraction == pytest.approx(2 / 3)
    assert errors.median_half_width_fraction == pytest.approx(0.2)


def test_the_interval_score_is_the_width_inside_and_more_outside() -> None:
    inside = errors_over([made(1.0, 1.0, half_width=0.1)])
    wider = errors_over([made(1.0, 1.0, half_width=0.2)])
    missed = errors_over([made(1.0, 0.8, half_width=0.1)])
    assert inside is not None
    assert wider is not None
    assert missed is not None
    assert inside.interval_score == pytest.approx(0.2)
    assert wider.interval_score == pytest.approx(0.4)
    assert missed.interval_score == pytest.approx(0.16 + PENALTY * (1 - 0.88))


def test_untimed_rows_have_no_errors() -> None:
    assert errors_over([made(1.0, 1.0, notes="EXCLUDE")]) is None
    assert mean_errors([]) is None


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=30), share=st.floats(0, 1))
def test_a_percentile_lies_within_and_grows_with_its_share(
    values: list[float], share: float
) -> None:
    one, more = percentile(values, share / 2), percentile(values, share)
    assert min(values) <= one <= more * (1 + 1e-12) + 1e-12
    assert more <= max(values)
    assert percentile(values, 1.0) == max(values)
