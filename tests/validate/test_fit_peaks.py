"""Peaks: what stacks are off by is told from what each row is, and a fit finds both again."""

from __future__ import annotations

import random
from math import sqrt

import pytest

from fsdpplan.files.runs import MemoryKind
from fsdpplan.validate.fit_peaks import Peak, coverage, fit_peak_errors, how_fitted, peaks_of
from tests.validate.tables import run


def drawn(
    *, stack: float, base: float, rows: int = 60, kind: MemoryKind = "reserved"
) -> list[Peak]:
    """Projects whose medians are `stack` off either way, with rows that are off by `base`."""
    chance = random.Random(1)
    return [
        Peak(
            project=f"project {number}",
            kind=kind,
            log_residual=stack * (-1) ** number + chance.gauss(0, base),
        )
        for number in range(8)
        for _ in range(rows)
    ]


def test_the_spread_between_projects_is_found() -> None:
    errors = fit_peak_errors(drawn(stack=0.1, base=0.02))
    assert errors.stack_fraction == pytest.approx(0.1, rel=0.1)


def test_where_stacks_are_alike_the_band_holds_four_in_five() -> None:
    peaks = drawn(stack=0.0, base=0.06, rows=300)
    inside = coverage(peaks, fit_peak_errors(peaks)).values()
    assert sum(inside) / len(inside) == pytest.approx(0.8, abs=0.03)


def test_rows_whose_kind_is_not_said_tell_of_stacks_alone() -> None:
    known = drawn(stack=0.0, base=0.03)
    unknown = [Peak(project="another", kind="unknown", log_residual=0.3) for _ in range(10)]
    assert coverage([*known, *unknown], fit_peak_errors(known)).keys() == {
        f"project {number}" for number in range(8)
    }
    alone, both = fit_peak_errors(known), fit_peak_errors([*known, *unknown])
    assert both.stack_fraction == pytest.approx(
        sqrt((8 * alone.stack_fraction**2 + 0.3**2) / 9), rel=0.01
    )
    assert "9 projects" in how_fitted([*known, *unknown], both)


def test_a_kind_that_is_not_said_is_the_nearest() -> None:
    constants = {"context_bytes": 0.0}
    (said,) = peaks_of([run(peak_mem_gib="50", notes="mem_kind=reserved")], constants)
    (unsaid,) = peaks_of([run(peak_mem_gib="50", notes="")], constants)
    assert (said.kind, unsaid.kind) == ("reserved", "unknown")
    assert abs(unsaid.log_residual) <= abs(said.log_residual)


def test_what_did_not_run_has_no_peak() -> None:
    assert not peaks_of([run(peak_mem_gib="50", notes="mem_kind=reserved", oom="y")], {})
