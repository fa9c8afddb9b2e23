"""Memory errors are of one kind each, and what fits is counted over what ran and what did not."""

from __future__ import annotations

import pytest

from fsdpplan.validate.compare.room import fit_counts, kind_errors, memory_errors
from tests.validate.made import made


def peak_of(notes: str) -> float:
    predicted = made(1.0, 1.0, peak_mem_gib="50", notes=notes).predicted_peak_memory_bytes
    assert predicted is not None
    return predicted / 2**30


def test_memory_errors_by_kind() -> None:
    notes = "mem_kind=reserved"
    peak = peak_of(notes)
    rows = [
        made(1.0, 1.0, peak_mem_gib=str(peak / factor), notes=notes)
        for factor in (0.8, 0.96, 1.0, 1.1)
    ]
    rows.append(made(1.0, 1.0, peak_mem_gib=str(2 * peak), notes="mem_kind=alloc"))
    rows.append(made(1.0, 1.0, peak_mem_gib="50"))  # of no known kind
    reserved, allocated = memory_errors(rows)
    assert (reserved.kind, reserved.rows, allocated.kind, allocated.rows) == (
        "reserved",
        4,
        "alloc",
        1,
    )
    assert reserved.median_abs_error_fraction == pytest.approx(0.07, abs=1e-3)
    assert reserved.far_under_fraction == 0.25
    assert reserved.worst_under_fraction == pytest.approx(0.2, abs=1e-3)


def test_what_fits_is_counted_by_what_happened() -> None:
    rows = [
        made(1.0, 1.0),
        made(1.0, 1.0, fits=False),
        made(1.0, 1.0, fits=False, oom="y"),
        made(1.0, 1.0, oom="y"),
        made(1.0, 1.0, fits=False, oom="fail"),  # nobody knows why
    ]
    counts = fit_counts(rows)
    assert (counts.ran, counts.ran_predicted_not_to_fit) == (2, 1)
    assert (counts.out_of_memory, counts.out_of_memory_predicted_not_to_fit) == (2, 1)


def test_the_band_is_that_of_the_rows_own_kind() -> None:
    row = made(1.0, 1.0, peak_mem_gib="50", notes="mem_kind=reserved")
    band = row.peak_memory_band_bytes
    assert band is not None
    assert row.prediction is not None
    assert band.expected == row.prediction.memory.peak_reserved_bytes
    for factor, inside in ((0.99 / band.expected, True), (1.01 / band.expected, False)):
        notes, edge = "mem_kind=reserved", str(band.upper * band.expected * factor / 2**30)
        assert made(1.0, 1.0, peak_mem_gib=edge, notes=notes).is_memory_covered == inside
    assert made(1.0, 1.0).is_memory_covered is None


def test_kinds_count_projects_alike() -> None:
    notes = "mem_kind=reserved"
    peak = peak_of(notes)
    mine = [made(1.0, 1.0, peak_mem_gib=str(peak), notes=notes) for _ in range(9)]
    theirs = made(1.0, 1.0, peak_mem_gib=str(2 * peak), notes=notes, source_id="theirs")
    (one,) = kind_errors([*mine, theirs])
    assert (one.kind, one.projects, one.rows) == ("reserved", 2, 10)
    assert one.coverage_fraction == 0.5
    assert one.median_error_fraction == pytest.approx(-0.25, abs=1e-3)
