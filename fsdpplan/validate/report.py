"""Report: each row predicted against measured, and the errors by source.

    error = predicted / measured - 1

Errors are taken over timed rows only: those that ran, whose notes do not rule them out, and that
have a step time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from fsdpplan.files.runs import MeasuredRun, MemoryKind
from fsdpplan.validate.express import express
from fsdpplan.validate.predict import Prediction, predict
from fsdpplan.validate.skipped import Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One row."""

    run: MeasuredRun
    outcome: Prediction | Skipped

    @property
    def error_fraction(self) -> float | None:
        """Predicted over measured step time, less 1; None where the row has none to compare."""
        measured = self.run.measured_step_seconds
        if isinstance(self.outcome, Skipped) or not self.run.is_timed or measured is None:
            return None
        return self.outcome.step_seconds.expected / measured - 1

    @property
    def is_covered(self) -> bool:
        """Whether the measured step time lies in the band."""
        measured = self.run.measured_step_seconds
        if isinstance(self.outcome, Skipped) or measured is None:
            return False
        return self.outcome.step_seconds.lower <= measured <= self.outcome.step_seconds.upper

    @property
    def memory_kind(self) -> MemoryKind | None:
        """What the row's memory figure counts."""
        return self.run.memory_kind

    @property
    def predicted_peak_memory_bytes(self) -> int | None:
        """The predicted peak in the row's own way of counting."""
        if isinstance(self.outcome, Skipped):
            return None
        return self.outcome.peak_memory_bytes(self.memory_kind)

    @property
    def fits(self) -> bool | None:
        """The prediction's."""
        return None if isinstance(self.outcome, Skipped) else self.outcome.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predictions were off."""

    median_abs_error_fraction: float
    mean_abs_error_fraction: float
    bias_fraction: float
    """Mean of the signed errors: above 0 predicts too slow."""
    coverage_fraction: float
    """Share of the measured values inside the 80 % band."""


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


def compare(run: MeasuredRun) -> ComparedRun:
    """The prediction for `run` beside it."""
    expressed = express(run)
    outcome = expressed if isinstance(expressed, Skipped) else predict(expressed)
    return ComparedRun(run=run, outcome=outcome)


def report(runs: Iterable[MeasuredRun]) -> Report:
    """Every row predicted, and the errors by source."""
    rows = tuple(compare(run) for run in runs)
    names = dict.fromkeys(row.run.source_id for row in rows)
    sources = tuple(
        source_report(name, [row for row in rows if row.run.source_id == name]) for name in names
    )
    compared = [source.errors for source in sources if source.errors is not None]
    return Report(rows=rows, sources=sources, mean_over_sources=mean_errors(compared))


def source_report(source_id: str, rows: Sequence[ComparedRun]) -> SourceReport:
    """The counts and errors of one source's rows."""
    skipped = Counter(row.outcome.reason for row in rows if isinstance(row.outcome, Skipped))
    compared = [row for row in rows if row.error_fraction is not None]
    return SourceReport(
        source_id=source_id,
        rows=len(rows),
        timed=sum(row.run.is_timed for row in rows),
        predicted=len(rows) - sum(skipped.values()),
        compared=len(compared),
        skipped=dict(skipped.most_common()),
        errors=_errors(compared),
    )


def _errors(rows: Sequence[ComparedRun]) -> Errors | None:
    signed = [row.error_fraction for row in rows if row.error_fraction is not None]
    if not signed:
        return None
    return Errors(
        median_abs_error_fraction=median(map(abs, signed)),
        mean_abs_error_fraction=mean(map(abs, signed)),
        bias_fraction=mean(signed),
        coverage_fraction=mean(float(row.is_covered) for row in rows),
    )


def mean_errors(errors: Sequence[Errors]) -> Errors | None:
    """The mean of each number."""
    if not errors:
        return None
    return Errors(
        median_abs_error_fraction=mean(one.median_abs_error_fraction for one in errors),
        mean_abs_error_fraction=mean(one.mean_abs_error_fraction for one in errors),
        bias_fraction=mean(one.bias_fraction for one in errors),
        coverage_fraction=mean(one.coverage_fraction for one in errors),
    )
