"""Peaks: what stacks are off by is told from what each row is, and a fit finds both again."""

from __future__ import annotations

import random
from statistics import NormalDist

import pytest

from fsdpplan.files.runs.table import MemoryKind
from fsdpplan.validate.fit.peaks import (
    MOST_INSIDE,
    Peak,
    coverage,
    fit_peak_errors,
    how_fitted,
    peaks_of,
)
from tests.validate.tables import run


def drawn(
    *,
    stack: float,
    base: float,
    projects: int = 8,
    rows: int = 60,
    kind: MemoryKind = "reserved",
) -> list[Peak]:
    """Projects that are off by `stack`, with rows that are off by `base` from that."""
    chance = random.Random(1)
    evenly = [NormalDist().inv_cdf((number + 0.5) / projects) for number in range(projects)]
    return [
        Peak(
            project=f"project {number}",
            kind=kind,
            log_residual=stack * evenly[number] + chance.gauss(0, base),
        )
        for number in range(projects)
        for _ in range(rows)
    ]


def test_what_projects_share_and_what_each_row_has_are_told_apart() -> None:
    errors = fit_peak_errors(drawn(stack=0.1, base=0.05, projects=20))
    assert errors.stack_fraction == pytest.approx(0.1, rel=0.15)
    assert errors.base_fraction == pytest.approx(0.05, rel=0.15)


def test_where_stacks_are_alike_the_band_holds_four_in_five() -> None:
    peaks = drawn(stack=0.0, base=0.06, rows=300)
    inside = coverage(peaks, fit_peak_errors(peaks)).values()
    assert sum(inside) / len(inside) == pytest.approx(0.8, abs=0.03)


def test_rows_whose_kind_is_not_said_tell_of_stacks_alone() -> None:
    known = drawn(stack=0.05, base=0.03)
    unknown = [Peak(project="another", kind="unknown", log_residual=0.2) for _ in range(10)]
    alone, both = fit_peak_errors(known), fit_peak_errors([*known, *unknown])
    assert coverage([*known, *unknown], both).keys() == {f"project {n}" for n in range(8)}
    assert both.stack_fraction > alone.stack_fraction
    assert both.base_fraction == pytest.approx(alone.base_fraction, rel=0.1)
    assert "9 projects" in how_fitted([*known, *unknown], both)


def test_what_is_guessed_widens_no_band_beyond_what_the_known_need() -> None:
    known = drawn(stack=0.0, base=0.05)
    unknown = [Peak(project="another", kind="unknown", log_residual=0.5)]
    inside = coverage(known, fit_peak_errors([*known, *unknown])).values()
    assert 0.8 < sum(inside) / len(inside) <= MOST_INSIDE + 1e-9


def test_a_kind_that_is_not_said_is_the_nearest() -> None:
    constants = {"context_bytes": 0.0}
    (said,) = peaks_of([run(peak_mem_gib="50", notes="mem_kind=reserved")], constants)
    (unsaid,) = peaks_of([run(peak_mem_gib="50", notes="")], constants)
    assert (said.kind, unsaid.kind) == ("reserved", "unknown")
    assert abs(unsaid.log_residual) <= abs(said.log_residual)


def test_what_did_not_run_has_no_peak() -> None:
    assert not peaks_of([run(peak_mem_gib="50", notes="mem_kind=reserved", oom="y")], {})
