"""A validation report as text and as JSON: docs/reference/validate-json.md."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from statistics import median
from typing import Annotated, Any, Literal, TypedDict

from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.files.plans import EACH_MAY_BE_NULL, LayoutJson
from fsdpplan.files.runs.table import Outcome
from fsdpplan.spec.plan import Interval, TimeBreakdown
from fsdpplan.validate.compare.compared import ComparedRun
from fsdpplan.validate.compare.errors import Errors
from fsdpplan.validate.compare.pairs import Change, Pair
from fsdpplan.validate.compare.ranking import RankedGroup, RankingErrors, ranking_errors
from fsdpplan.validate.compare.report import Report, SourceReport
from fsdpplan.validate.compare.room import FitCounts, KindErrors, MemoryErrors
from fsdpplan.validate.learn.validated import LearnedReport
from fsdpplan.validate.runs.skipped import Skipped

MOST_ASSUMPTIONS = 12
"""Sentences on the screen; JSON has all of them, row by row."""

NO_ERRORS = ("-", "-", "-", "-", "-")

LEGEND = (
    "timed: predicted of the rows that have a step time to compare. Errors are predicted / "
    "measured step time - 1: median and 90th percentile of their size, bias their mean (above 0: "
    "predicted too slow). band: measured inside the 80 % band, and its median half-width."
)


def report_screen(before: Report, learned: LearnedReport | None = None, *, width: int) -> str:
    """Errors by source, memory, ranking, what was skipped and why, and what was assumed."""
    report = before if learned is None else learned.report
    predicted = sum(source.predicted for source in report.sources)
    head = f"{len(report.rows):,} measured runs, {predicted:,} predicted"
    return blocks(
        wrapped(head, width=width),
        wrapped(_learning(learned), width=width),
        _sources_table(report, width),
        wrapped(LEGEND, width=width),
        listed("Peak memory", _memory(report.memory), width=width),
        listed("What fits", _fits(report.fits), width=width),
        listed("What a change gains", _pairs(report.pairs), width=width),
        listed("The layout ranked first, against the best measured", _ranking(report), width=width),
        listed("Not predicted", _skips(report.sources), width=width),
        listed("Assumed where the table says nothing, by rows", _assumed(report), width=width),
    )


def _learning(learned: LearnedReport | None) -> str:
    """What learning brought, in one sentence."""
    if learned is None:
        return ""
    words = [
        "nothing to compare"
        if errors is None
        else f"{errors.median_abs_error_fraction:.1%} off, "
        f"{errors.coverage_fraction:.0%} inside the band"
        for errors in (learned.before_errors, learned.after_errors)
    ]
    return (
        f"As shipped {words[0]}; after learning from {learned.runs:,} "
        f"run{'' if learned.runs == 1 else 's'} {words[1]} (median over rows). The table below is "
        "after learning."
    )


def _sources_table(report: Report, width: int) -> str:
    rows = [
        (source.source_id, f"{source.compared}/{source.timed}", *_error_words(source.errors))
        for source in report.sources
    ]
    if report.mean_over_sources is not None:
        rows.append(("mean over sources", "", *_error_words(report.mean_over_sources)))
    headers = ("source", "timed", "median", "p90", "bias", "band", "width")
    return table(rows, headers=headers, align=("left", *["right"] * 6), width=width)


def _error_words(errors: Errors | None) -> tuple[str, ...]:
    if errors is None:
        return NO_ERRORS
    return (
        f"{errors.median_abs_error_fraction:.1%}",
        f"{errors.p90_abs_error_fraction:.1%}",
        f"{errors.bias_fraction:+.1%}",
        f"{errors.coverage_fraction:.0%}",
        f"{errors.median_half_width_fraction:.0%}",
    )


def _memory(memory: tuple[MemoryErrors, ...]) -> list[str]:
    return [_memory_words(one) for one in memory]


def _memory_words(one: MemoryErrors) -> str:
    return (
        f"{one.source_id}, {one.kind}: {one.rows} rows, median "
        f"{one.median_abs_error_fraction:.1%}, bias {one.bias_fraction:+.1%}; "
        f"{one.far_under_fraction:.0%} more than 5 % under, the worst "
        f"{one.worst_under_fraction:.0%}{_inside(one.coverage_fraction)}"
    )


def _inside(coverage_fraction: float | None) -> str:
    return "" if coverage_fraction is None else f"; {coverage_fraction:.0%} inside the 80 % band"


def _fits(fits: FitCounts) -> list[str]:
    said = []
    if fits.ran:
        share = fits.ran_predicted_not_to_fit / fits.ran
        said.append(
            f"{fits.ran_predicted_not_to_fit} of {fits.ran} rows that ran are predicted not to "
            f"fit ({share:.1%})"
        )
    if fits.out_of_memory:
        said.append(
            f"{fits.out_of_memory_predicted_not_to_fit} of {fits.out_of_memory} rows that ran out "
            "of memory are predicted not to fit"
        )
    return said


def _pairs(pairs: tuple[Pair, ...]) -> list[str]:
    by_change: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_change.setdefault(pair.change, []).append(pair)
    return [
        f"{change}: {len(some)} {'pair' if len(some) == 1 else 'pairs'}, "
        "predicted over measured gain off by "
        f"{median(abs(pair.error_fraction) for pair in some):.1%}, at worst "
        f"{max(abs(pair.error_fraction) for pair in some):.1%}"
        for change, some in by_change.items()
    ]


def _ranking(report: Report) -> list[str]:
    sources = dict.fromkeys(group.source_id for group in report.groups)
    found = [
        ranking_errors(source, [group for group in report.groups if group.source_id == source])
        for source in sources
    ]
    return [_ranking_words(one) for one in found if one is not None]


def _ranking_words(ranking: RankingErrors) -> str:
    groups = "group" if ranking.groups == 1 else "groups"
    return (
        f"{ranking.source_id}: {ranking.groups} {groups} of 3 layouts or more; slower by "
        f"{ranking.median_regret_fraction:.1%}, at worst {ranking.worst_regret_fraction:.1%}; "
        f"rank correlation {ranking.mean_spearman:.2f}"
    )


def _skips(sources: tuple[SourceReport, ...]) -> list[str]:
    return [
        f"{source.source_id}: "
        + "; ".join(f"{reason} ({count})" for reason, count in source.skipped.items())
        for source in sources
        if source.skipped
    ]


def _assumed(report: Report) -> list[str]:
    counts = Counter(
        sentence
        for row in report.rows
        if not isinstance(row.outcome, Skipped)
        for sentence in row.outcome.assumptions
    )
    said = [f"{sentence} ({count})" for sentence, count in counts.most_common(MOST_ASSUMPTIONS)]
    more = len(counts) - len(said)
    return [*said, f"{more} more, row by row with --json"] if more else said


IntervalJson = Annotated[dict[str, Any], Interval]


class RowJson(TypedDict):
    """One row of the table beside its prediction; null: not measured, or not predicted."""

    row: int
    source_id: str
    status: Literal["predicted", "skipped"]
    reason: str | None
    """Why it was skipped."""
    measured_step_seconds: float | None
    predicted_step_seconds: IntervalJson | None
    without_runs_step_seconds: IntervalJson | None
    """As predicted without learning."""
    measured_peak_memory_bytes: int | None
    memory_kind: str | None
    predicted_peak_memory_bytes: int | None
    predicted_peak_memory_band_bytes: IntervalJson | None
    predicted_fits: bool | None
    predicted_fits_fraction: float | None
    predicted_least_device_bytes: int | None
    outcome: Outcome
    is_timed: bool
    error_fraction: float | None
    memory_error_fraction: float | None
    layout: LayoutJson | None
    time: Annotated[dict[str, Any], TimeBreakdown] | None
    assumptions: list[str]


ErrorsJson = Annotated[dict[str, float | None], Errors, EACH_MAY_BE_NULL]


class SourceJson(TypedDict):
    """The rows of one source, beside their errors."""

    source_id: str
    rows: int
    predicted: int
    timed: int
    compared: int
    skipped: dict[str, int]
    """Reason -> rows."""


class PairJson(TypedDict):
    """Two runs that differ in one thing."""

    change: Change
    source_id: str
    row_without: int
    row_with: int
    measured_gain: float
    predicted_gain: float
    error_fraction: float


class LearnedJson(TypedDict):
    """What learning from runs changes."""

    runs: int
    as_shipped: ErrorsJson
    after_learning: ErrorsJson


class ValidateJson(TypedDict):
    """What `validate --json` prints."""

    rows: list[RowJson]
    sources: list[Annotated[dict[str, Any], Errors, EACH_MAY_BE_NULL, SourceJson]]
    mean_over_sources: ErrorsJson
    memory: list[Annotated[dict[str, Any], MemoryErrors]]
    memory_kinds: list[Annotated[dict[str, Any], KindErrors]]
    fits: Annotated[dict[str, Any], FitCounts]
    pairs: list[PairJson]
    ranking: Annotated[dict[str, Any], RankingErrors] | None
    groups: list[Annotated[dict[str, Any], RankedGroup]]
    learned: LearnedJson | None


def report_json(before: Report, learned: LearnedReport | None = None) -> str:
    """Every row, the sources, and what is made of both; after learning where there was any."""
    report = before if learned is None else learned.report
    ranking = ranking_errors("all", report.groups)
    document: ValidateJson = {
        "rows": [
            _row_document(row, without)
            for row, without in zip(report.rows, before.rows, strict=True)
        ],
        "sources": [_source_document(source) for source in report.sources],
        "mean_over_sources": _errors_document(report.mean_over_sources),
        "memory": [asdict(one) for one in report.memory],
        "memory_kinds": [asdict(one) for one in report.memory_kinds],
        "fits": asdict(report.fits),
        "pairs": [_pair_document(pair) for pair in report.pairs],
        "ranking": asdict(ranking) if ranking else None,
        "groups": [asdict(group) for group in report.groups],
        "learned": None if learned is None else _learned_document(learned),
    }
    return json.dumps(document, indent=2)


def _learned_document(learned: LearnedReport) -> LearnedJson:
    return {
        "runs": learned.runs,
        "as_shipped": _errors_document(learned.before_errors),
        "after_learning": _errors_document(learned.after_errors),
    }


def _row_document(row: ComparedRun, without: ComparedRun) -> RowJson:
    skipped = row.outcome if isinstance(row.outcome, Skipped) else None
    prediction = row.prediction
    memory_band = row.peak_memory_band_bytes
    return {
        "row": row.run.row,
        "source_id": row.run.source_id,
        "status": "predicted" if skipped is None else "skipped",
        "reason": None if skipped is None else skipped.sentence,
        "measured_step_seconds": row.run.measured_step_seconds,
        "predicted_step_seconds": asdict(prediction.step_seconds) if prediction else None,
        "without_runs_step_seconds": (
            asdict(without.prediction.step_seconds) if without.prediction else None
        ),
        "measured_peak_memory_bytes": row.run.peak_memory_bytes,
        "memory_kind": row.memory_kind,
        "predicted_peak_memory_bytes": row.predicted_peak_memory_bytes,
        "predicted_peak_memory_band_bytes": asdict(memory_band) if memory_band else None,
        "predicted_fits": row.fits,
        "predicted_fits_fraction": prediction.memory.fits_fraction if prediction else None,
        "predicted_least_device_bytes": (
            prediction.memory.least_device_bytes if prediction else None
        ),
        "outcome": row.run.outcome,
        "is_timed": row.run.is_timed,
        "error_fraction": row.error_fraction,
        "memory_error_fraction": row.memory_error_fraction,
        "layout": asdict(prediction.layout) if prediction else None,
        "time": asdict(prediction.time) if prediction else None,
        "assumptions": list(prediction.assumptions) if prediction else [],
    }


def _source_document(source: SourceReport) -> dict[str, Any]:
    said: SourceJson = {
        "source_id": source.source_id,
        "rows": source.rows,
        "predicted": source.predicted,
        "timed": source.timed,
        "compared": source.compared,
        "skipped": dict(source.skipped),
    }
    return {**said, **_errors_document(source.errors)}


def _errors_document(errors: Errors | None) -> dict[str, float | None]:
    return dict.fromkeys(Errors.__dataclass_fields__) if errors is None else asdict(errors)


def _pair_document(pair: Pair) -> PairJson:
    return {
        "change": pair.change,
        "source_id": pair.without.run.source_id,
        "row_without": pair.without.run.row,
        "row_with": pair.with_change.run.row,
        "measured_gain": pair.measured_gain,
        "predicted_gain": pair.predicted_gain,
        "error_fraction": pair.error_fraction,
    }
