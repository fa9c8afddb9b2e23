"""The error of a difference: fitted to pairs of layouts, and holding 80 % of them."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.cluster import StepError
from fsdpplan.spec.plan import TimeBreakdown
from fsdpplan.validate.compare.pairs import coverage, fit_layout_error, layout_pairs
from fsdpplan.validate.fit.held_out import HeldOutRow
from tests.validate.tables import run

NOTHING = StepError(**dict.fromkeys([field.name for field in fields(StepError)], 0.0))


def row(number: int, *, measured: float, predicted: float, project: str = "one") -> HeldOutRow:
    """A row whose step is all compute."""
    time = TimeBreakdown(
        compute_seconds=predicted,
        exposed_communication_seconds=0.0,
        bubble_seconds=0.0,
        optimizer_seconds=0.0,
        matmul_seconds=predicted,
    )
    return HeldOutRow(
        row=number,
        project=project,
        measured_step_seconds=measured,
        evidence="fitted",
        unknown_log_error=0.0,
        time=time,
    )


def jobs(number: int) -> list[MeasuredRun]:
    """Runs of as many jobs, two of each."""
    return [run(model_name=f"model {index // 2}") for index in range(2 * number)]


def test_pairs_are_of_one_job_and_rows_of_one_layout_count_once() -> None:
    runs = [run(), run(), run(), run(model_name="another")]
    rows = [
        row(0, measured=1.0, predicted=1.0),
        row(1, measured=3.0, predicted=1.0),
        row(2, measured=2.0, predicted=1.5),
        row(3, measured=2.0, predicted=1.7),
    ]
    (pair,) = layout_pairs(rows, runs)
    assert (pair.one.measured_step_seconds, pair.other.row) == (2.0, 2)
    assert exp(pair.log_difference) == pytest.approx(1 / 2 / (1.5 / 2))


@given(st.floats(0.5, 2.0), st.floats(0.1, 10.0))
def test_a_prediction_that_is_off_by_one_factor_has_no_error_of_differences(
    factor: float, times: float
) -> None:
    rows = [
        row(0, measured=factor, predicted=1.0),
        row(1, measured=factor * times * 1.01, predicted=times * 1.01),
    ]
    (pair,) = layout_pairs(rows, jobs(1))
    assert pair.log_difference == pytest.approx(0.0, abs=1e-9)


def test_the_fit_finds_the_error_that_the_pairs_have() -> None:
    draw = random.Random(3)
    rows = []
    for index in range(0, 800, 2):
        off = exp(draw.gauss(0.0, 0.05))
        rows += [
            row(index, measured=1.0, predicted=1.1),
            row(index + 1, measured=2.0, predicted=2.2 * off),
        ]
    pairs = layout_pairs(rows, jobs(400))
    fitted = fit_layout_error(pairs, {"fitted": NOTHING})
    assert fitted == pytest.approx(0.05, rel=0.25)
    found = coverage(pairs, {"fitted": replace(NOTHING, layout_fraction=fitted)})
    assert found.pairs == 400
    assert found.fraction == pytest.approx(0.8, abs=0.01)
    assert found.weighted_fraction == pytest.approx(found.fraction)
