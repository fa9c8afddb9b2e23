"""Ledger rows as JSON, and back. Reading needs pydantic, which costs more than planning does."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.spec.ledger import LedgerRow

PARTS = ("job", "machines", "predicted", "observed")
"""Columns of JSON."""


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
        **parts,
    }


def read_row(values: dict[str, Any]) -> LedgerRow | None:
    """The row in these columns; None where another fsdpplan wrote what this one does not know."""
    from fsdpplan.files.documents import validate_ledger

    try:
        texts = {name: json.loads(values[name]) for name in (*PARTS, "versions")}
        document = validate_ledger(texts)
    except (SpecError, ValueError, TypeError, RecursionError):
        return None
    return LedgerRow(
        ended_at=str(values["ended_at"]),
        plan_sha256=str(values["plan_sha256"]),
        run_folder=str(values["run_folder"]),
        target=str(values["target"]),
        job=document.job,
        machines=document.machines,
        predicted=document.predicted,
        observed=document.observed,
        versions=tuple(document.versions.items()),
    )
