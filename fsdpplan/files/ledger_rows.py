"""Ledger rows as JSON, and back. Reading needs pydantic, which costs more than planning does."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.spec.ledger import OWN_SOFTWARE, LedgerRow

PARTS = ("job", "machines", "predicted", "observed")
"""Columns of JSON."""
_AS_JSON = (*PARTS, "versions", "cells")


def row_values(row: LedgerRow) -> dict[str, str | float | None]:
    """Column -> value. What is asked for most has columns of its own, for whoever reads by SQL."""
    parts = {part: json.dumps(asdict(getattr(row, part)), allow_nan=False) for part in PARTS}
    return {
        "ended_at": row.ended_at,
        "plan_sha256": row.plan_sha256,
        "run_folder": row.run_folder,
        "target": row.target,
        "cluster": row.machines.cluster,
        "device": row.machines.device,
        "gpus": row.machines.gpus,
        "model": row.job.model.name,
        "predicted_step_seconds": row.predicted.step_seconds.expected,
        "measured_step_seconds": row.observed.step_seconds,
        "exit_code": row.observed.exit_code,
        "failure": row.observed.failure,
        "versions": json.dumps(dict(row.versions)),
        "origin": row.origin,
        "software": row.software,
        "cells": json.dumps(dict(row.cells)),
        **parts,
    }


def same_run(row: LedgerRow) -> str:
    """Equal for one run, however it came: by `run`, from its folder, from a table or an export."""
    if row.cells:
        return json.dumps(dict(row.cells), sort_keys=True)
    return json.dumps([row.plan_sha256, asdict(row.observed)], sort_keys=True)


def row_document(row: LedgerRow) -> dict[str, Any]:
    """The row as JSON has it."""
    return asdict(row) | {"versions": dict(row.versions), "cells": dict(row.cells)}


def row_of_document(document: dict[str, Any]) -> LedgerRow | None:
    """The row in a line that `ledger --export` wrote; None where this fsdpplan does not know it."""
    values = {name: json.dumps(value) for name, value in document.items() if name in _AS_JSON}
    return read_row({**document, **values, "run_folder": document.get("run_folder") or ""})


def read_row(values: dict[str, Any]) -> LedgerRow | None:
    """The row in these columns; None where another fsdpplan wrote what this one does not know."""
    from fsdpplan.files.documents import validate_ledger

    try:
        texts = {name: json.loads(values[name]) for name in (*PARTS, "versions")}
        document = validate_ledger(texts)
        cells = _cells(json.loads(values.get("cells") or "{}"))
    except (SpecError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return LedgerRow(
        ended_at=str(values.get("ended_at", "")),
        plan_sha256=str(values.get("plan_sha256", "")),
        run_folder=str(values.get("run_folder", "")),
        target=str(values.get("target", "")),
        job=document.job,
        machines=document.machines,
        predicted=document.predicted,
        observed=document.observed,
        versions=tuple(document.versions.items()),
        origin=str(values.get("origin") or "run"),
        software=str(values.get("software") or OWN_SOFTWARE),
        cells=cells,
    )


def _cells(found: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, dict):
        raise SpecError("cells must be a table of columns")
    return tuple((str(name), str(text)) for name, text in found.items())
