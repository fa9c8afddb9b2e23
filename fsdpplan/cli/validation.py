"""A validation report as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from fsdpplan.cli.render import blocks, listed, table, wrapped
from fsdpplan.validate.report import ComparedRun, Errors, Report, SourceReport
from fsdpplan.validate.skipped import Skipped

MOST_ASSUMPTIONS = 12
"""Sentences on the screen; JSON has all of them, row by row."""
NO_ERRORS = ("-", "-", "-", "-")


def screen(report: Report, *, width: int) -> str:
    """Errors by source, what was skipped and why, and what was assumed."""
    predicted = sum(source.predicted for source in report.sources)
    head = f"{len(report.rows):,} measured runs, {predicted:,} predicted"
    return blocks(
        wrapped(head, width=width),
        _sources_table(report, width),
        listed("Not predicted", _skips(report.sources), width=width),
        listed("Assumed where the table says nothing, by rows", _assumed(report), width=width),
        wrapped(
            "rows, timed: predicted of all, and of those with a step time to compare. Errors are "
            "predicted / measured step time - 1: median and mean of their size, bias their mean "
            "(above 0: predicted too slow). band: measured inside the 80 % band.",
            width=width,
        ),
    )


def _sources_table(report: Report, width: int) -> str:
    rows = [
        (
            source.source_id,
            f"{source.predicted}/{source.rows}",
            f"{source.compared}/{source.timed}",
            *_error_words(source.errors),
        )
        for source in report.sources
    ]
    if report.mean_over_sources is not None:
        rows.append(("mean over sources", "", "", *_error_words(report.mean_over_sources)))
    headers = ("source", "rows", "timed", "median", "mean", "bias", "band")
    return table(rows, headers=headers, align=("left", *["right"] * 6), width=width)


def _error_words(errors: Errors | None) -> tuple[str, ...]:
    if errors is None:
        return NO_ERRORS
    return (
        f"{errors.median_abs_error_fraction:.1%}",
        f"{errors.mean_abs_error_fraction:.1%}",
        f"{errors.bias_fraction:+.1%}",
        f"{errors.coverage_fraction:.0%}",
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


def report_json(report: Report) -> str:
    """Every row, and the sources; docs/reference/json.md."""
    document = {
        "rows": [_row_document(row) for row in report.rows],
        "sources": [_source_document(source) for source in report.sources],
        "mean_over_sources": _errors_document(report.mean_over_sources),
    }
    return json.dumps(document, indent=2)


def _row_document(row: ComparedRun) -> dict[str, Any]:
    skipped = row.outcome if isinstance(row.outcome, Skipped) else None
    prediction = None if isinstance(row.outcome, Skipped) else row.outcome
    return {
        "row": row.run.row,
        "source_id": row.run.source_id,
        "status": "predicted" if skipped is None else "skipped",
        "reason": None if skipped is None else skipped.sentence,
        "measured_step_seconds": row.run.measured_step_seconds,
        "predicted_step_seconds": asdict(prediction.step_seconds) if prediction else None,
        "measured_peak_memory_bytes": row.run.peak_memory_bytes,
        "memory_kind": row.memory_kind,
        "predicted_peak_memory_bytes": row.predicted_peak_memory_bytes,
        "predicted_fits": row.fits,
        "outcome": row.run.outcome,
        "error_fraction": row.error_fraction,
        "layout": asdict(prediction.layout) if prediction else None,
        "assumptions": list(prediction.assumptions) if prediction else [],
    }


def _source_document(source: SourceReport) -> dict[str, Any]:
    return {
        "source_id": source.source_id,
        "rows": source.rows,
        "predicted": source.predicted,
        **_errors_document(source.errors),
        "timed": source.timed,
        "compared": source.compared,
        "skipped": dict(source.skipped),
    }


def _errors_document(errors: Errors | None) -> dict[str, float | None]:
    return dict.fromkeys(Errors.__dataclass_fields__) if errors is None else asdict(errors)
