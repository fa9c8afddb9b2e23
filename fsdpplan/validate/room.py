"""Room: predicted peaks against measured ones, and whether what ran was said to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from fsdpplan.files.runs import MemoryKind
from fsdpplan.validate.compared import ComparedRun

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
    groups: dict[tuple[str, MemoryKind], list[float]] = {}
    for row in rows:
        if row.memory_error_fraction is not None and row.memory_kind is not None:
            key = (row.run.source_id, row.memory_kind)
            groups.setdefault(key, []).append(row.memory_error_fraction)
    return tuple(
        MemoryErrors(
            source_id=source_id,
            kind=kind,
            rows=len(errors),
            median_abs_error_fraction=median(map(abs, errors)),
            bias_fraction=mean(errors),
            far_under_fraction=mean(float(error < -FAR_UNDER) for error in errors),
            worst_under_fraction=max(0.0, -min(errors)),
        )
        for (source_id, kind), errors in groups.items()
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
