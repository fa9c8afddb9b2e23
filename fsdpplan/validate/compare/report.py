"""Report: each row predicted against measured, and the errors by source.

Errors are taken over timed rows only: those that ran, whose notes do not rule them out, and that
have a step time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.validate.compare.compared import ComparedRun, compare
from fsdpplan.validate.compare.errors import Errors, errors_over, mean_errors
from fsdpplan.validate.compare.pairs import Pair, pairs_among
from fsdpplan.validate.compare.predict import Fits
from fsdpplan.validate.compare.ranking import RankedGroup, ranked_groups
from fsdpplan.validate.compare.room import (
    FitCounts,
    KindErrors,
    MemoryErrors,
    fit_counts,
    kind_errors,
    memory_errors,
)
from fsdpplan.validate.runs.skipped import Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """All rows of one source."""

    source_id: str
    rows: int
    timed: int
    """Rows with a step time to compare, predicted or not."""
    predicted: int
    """Rows that got a prediction, timed or not."""
    compared: int
    """Rows that the errors are over: timed and predicted."""
    skipped: Mapping[str, int]
    """Rows without a prediction, by reason, the most frequent first."""
    errors: Errors | None
    """None where nothing was compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole table."""

    rows: tuple[ComparedRun, ...]
    sources: tuple[SourceReport, ...]
    """In the order of the table."""
    mean_over_sources: Errors | None
    """Each number averaged over the sources that were compared, whatever their rows."""
    memory: tuple[MemoryErrors, ...]
    """By source and way of counting."""
    memory_kinds: tuple[KindErrors, ...]
    """By way of counting alone, projects counted alike."""
    fits: FitCounts
    pairs: tuple[Pair, ...]
    groups: tuple[RankedGroup, ...]


def report(runs: Iterable[MeasuredRun], fits: Fits | None = None) -> Report:
    """Every row predicted, and the errors by source."""
    return report_of(tuple(compare(run, fits) for run in runs))


def report_of(rows: Sequence[ComparedRun]) -> Report:
    """The errors of rows that were compared already."""
    names = dict.fromkeys(row.run.source_id for row in rows)
    sources = tuple(
        source_report(name, [row for row in rows if row.run.source_id == name]) for name in names
    )
    compared = [source.errors for source in sources if source.errors is not None]
    return Report(
        rows=tuple(rows),
        sources=sources,
        mean_over_sources=mean_errors(compared),
        memory=memory_errors(rows),
        memory_kinds=kind_errors(rows),
        fits=fit_counts(rows),
        pairs=pairs_among(rows),
        groups=ranked_groups(rows),
    )


def source_report(source_id: str, rows: Sequence[ComparedRun]) -> SourceReport:
    """The counts and errors of one source's rows."""
    skipped = Counter(row.outcome.reason for row in rows if isinstance(row.outcome, Skipped))
    return SourceReport(
        source_id=source_id,
        rows=len(rows),
        timed=sum(row.run.is_timed for row in rows),
        predicted=len(rows) - sum(skipped.values()),
        compared=sum(row.error_fraction is not None for row in rows),
        skipped=dict(skipped.most_common()),
        errors=errors_over(rows),
    )
