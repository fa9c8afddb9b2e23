"""A validation report as JSON: docs/reference/validate-json.md."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fsdpplan.validate.compared import ComparedRun
from fsdpplan.validate.errors import Errors
from fsdpplan.validate.learn.validated import LearnedReport
from fsdpplan.validate.pairs import Pair
from fsdpplan.validate.ranking import ranking_errors
from fsdpplan.validate.report import Report, SourceReport
from fsdpplan.validate.skipped import Skipped


def report_json(before: Report, learned: LearnedReport | None = None) -> str:
    """Every row, the sources, and what is made of both; after learning where there was any."""
    report = before if learned is None else learned.report
    ranking = ranking_errors("all", report.groups)
    document = {
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


def _learned_document(learned: LearnedReport) -> dict[str, Any]:
    return {
        "runs": learned.runs,
        "as_shipped": _errors_document(learned.before_errors),
        "after_learning": _errors_document(learned.after_errors),
    }


def _row_document(row: ComparedRun, without: ComparedRun) -> dict[str, Any]:
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


def _pair_document(pair: Pair) -> dict[str, Any]:
    return {
        "change": pair.change,
        "source_id": pair.without.run.source_id,
        "row_without": pair.without.run.row,
        "row_with": pair.with_change.run.row,
        "measured_gain": pair.measured_gain,
        "predicted_gain": pair.predicted_gain,
        "error_fraction": pair.error_fraction,
    }
