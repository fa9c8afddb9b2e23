"""Room: predicted peaks against measured ones, and whether what ran was said to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from fsdpplan.files.runs.table import MemoryKind
from fsdpplan.validate.compare.compared import ComparedRun
from fsdpplan.validate.runs.projects import HALF_AUTOCAST, project_of

FAR_UNDER = 0.05
"""A prediction that is more than this below the peak may run out of memory unwarned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """Peaks of one source and one way of counting."""

    source_id: str
    kind: MemoryKind
    rows: int
    median_abs_error_fraction: float
    bias_fraction: float
    """Mean of the signed errors: above 0 predicts too much."""
    far_under_fraction: float
    """Share of the rows predicted more than 5 % under."""
    worst_under_fraction: float
    """The furthest that a prediction lies below its peak; 0: none does."""
    median_error_fraction: float
    """Median of the signed errors."""
    coverage_fraction: float | None
    """Share of the peaks inside the 80 % band; None where no row has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindErrors:
    """Peaks of one way of counting, each number as a mean over projects, whatever their rows."""

    kind: MemoryKind
    projects: int
    rows: int
    median_abs_error_fraction: float
    median_error_fraction: float
    """Of the signed errors: below 0 predicts too little."""
    coverage_fraction: float | None
    """Share of the peaks inside the 80 % band; None where no row has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCounts:
    """What ran and what did not, against what was predicted to fit."""

    ran: int
    """Rows that ran and were predicted."""
    ran_predicted_not_to_fit: int
    out_of_memory: int
    """Rows that ran out of memory and were predicted."""
    out_of_memory_predicted_not_to_fit: int


def memory_errors(rows: Sequence[ComparedRun]) -> tuple[MemoryErrors, ...]:
    """One value for each source and kind that has peaks to compare, in the rows' order."""
    groups: dict[tuple[str, MemoryKind], list[ComparedRun]] = {}
    for row in rows:
        if row.memory_error_fraction is not None and row.memory_kind is not None:
            groups.setdefault((row.run.source_id, row.memory_kind), []).append(row)
    return tuple(_memory_errors(*key, some) for key, some in groups.items())


def _memory_errors(source_id: str, kind: MemoryKind, rows: Sequence[ComparedRun]) -> MemoryErrors:
    errors = _errors(rows)
    return MemoryErrors(
        source_id=source_id,
        kind=kind,
        rows=len(errors),
        median_abs_error_fraction=median(map(abs, errors)),
        bias_fraction=mean(errors),
        far_under_fraction=mean(float(error < -FAR_UNDER) for error in errors),
        worst_under_fraction=max(0.0, -min(errors)),
        median_error_fraction=median(errors),
        coverage_fraction=_coverage(rows),
    )


def _errors(rows: Sequence[ComparedRun]) -> list[float]:
    return [row.memory_error_fraction for row in rows if row.memory_error_fraction is not None]


def _coverage(rows: Sequence[ComparedRun]) -> float | None:
    covered = [row.is_memory_covered for row in rows if row.is_memory_covered is not None]
    return mean(map(float, covered)) if covered else None


def kind_errors(rows: Sequence[ComparedRun]) -> tuple[KindErrors, ...]:
    """One value for each kind that has peaks to compare, projects counted alike; without the
    script whose figures are of something else than its model (`projects.HALF_AUTOCAST`)."""
    kinds: dict[MemoryKind, dict[str, list[ComparedRun]]] = {}
    for row in rows:
        project = project_of(row.run.source_id)
        is_apart = project == HALF_AUTOCAST or row.memory_error_fraction is None
        if not is_apart and row.memory_kind is not None:
            kinds.setdefault(row.memory_kind, {}).setdefault(project, []).append(row)
    return tuple(_kind_errors(kind, list(some.values())) for kind, some in kinds.items())


def _kind_errors(kind: MemoryKind, projects: Sequence[Sequence[ComparedRun]]) -> KindErrors:
    errors = [_errors(rows) for rows in projects]
    covered = [share for rows in projects if (share := _coverage(rows)) is not None]
    return KindErrors(
        kind=kind,
        projects=len(projects),
        rows=sum(map(len, errors)),
        median_abs_error_fraction=mean(median(map(abs, some)) for some in errors),
        median_error_fraction=mean(map(median, errors)),
        coverage_fraction=mean(covered) if covered else None,
    )


def fit_counts(rows: Sequence[ComparedRun]) -> FitCounts:
    """The counts over all predicted rows."""
    ran = [row for row in rows if row.prediction and row.run.outcome == "n"]
    out = [row for row in rows if row.prediction and row.run.outcome == "y"]
    return FitCounts(
        ran=len(ran),
        ran_predicted_not_to_fit=sum(not row.fits for row in ran),
        out_of_memory=len(out),
        out_of_memory_predicted_not_to_fit=sum(not row.fits for row in out),
    )
