"""The band's errors: the score that they are fitted by, and that the fit finds them."""

from __future__ import annotations

import random
from math import exp, log

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import NORMAL_80, log_error
from fsdpplan.spec.plan import TimeBreakdown
from fsdpplan.validate.fit.bands import (
    fit_error,
    interval_score,
    predicted_spread,
    stack_spread,
)
from fsdpplan.validate.fit.held_out import HeldOutRow
from fsdpplan.validate.fit.robust import MAD


@given(st.floats(0, 1), st.floats(-2, 2))
def test_a_miss_costs_ten_times_what_it_misses_by(half_width: float, residual: float) -> None:
    score = interval_score(half_width=half_width, log_residual=residual)
    assert score >= 2 * half_width
    if abs(residual) <= half_width:
        assert score == 2 * half_width


def test_the_fitted_band_holds_about_80_percent_of_what_it_was_fitted_to() -> None:
    draw = random.Random(7)
    rows = []
    for index in range(400):
        across = draw.uniform(0.0, 0.6)
        time = TimeBreakdown(
            compute_seconds=1 - across,
            exposed_communication_seconds=across,
            bubble_seconds=0.0,
            optimizer_seconds=0.0,
            matmul_seconds=1 - across,
            exposed_across_seconds=across,
        )
        residual = draw.gauss(0.0, 0.04) * (1 - across) + draw.gauss(0.0, 0.5) * across
        rows.append(
            HeldOutRow(
                row=index,
                project=f"project {index % 4}",
                measured_step_seconds=exp(-residual),
                evidence="fitted",
                time=time,
                unknown_log_error=0.0,
            )
        )
    found = fit_error(rows, evidence="fitted", stack_fraction=0.0)
    inside = [abs(_log_residual(row)) <= NORMAL_80 * log_error(row.time, found) for row in rows]
    assert 0.72 <= sum(inside) / len(rows) <= 0.88
    assert found.across_fraction > 3 * found.matmul_fraction


def _log_residual(row: HeldOutRow) -> float:

    return log(row.predicted_step_seconds / row.measured_step_seconds)


def test_projects_that_lie_apart_are_told_from_rows_that_do() -> None:
    draw = random.Random(3)
    time = TimeBreakdown(
        compute_seconds=1.0,
        exposed_communication_seconds=0.0,
        bubble_seconds=0.0,
        optimizer_seconds=0.0,
        matmul_seconds=1.0,
    )
    rows = [
        HeldOutRow(
            row=0,
            project=str(project),
            measured_step_seconds=exp(away + draw.gauss(0.0, 0.03)),
            evidence="fitted",
            time=time,
            unknown_log_error=0.0,
        )
        for project, away in enumerate((-0.1, 0.1) * 6)
        for _ in range(30)
    ]
    assert abs(stack_spread(rows) - 0.1 * MAD) < 0.01 * MAD
    inside = [row for row in rows if row.project in "01"]
    assert stack_spread(inside) > 0.08
    # two projects tell less of the next one than twelve
    assert predicted_spread(inside) > 1.5 * stack_spread(inside)
    assert 1.0 < predicted_spread(rows) / stack_spread(rows) < 1.2
