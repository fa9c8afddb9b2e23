"""What `calibrate --json` prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fsdpplan.cli.resolve.calibration import Checked, Fitted
from fsdpplan.cli.views.calibration import had
from fsdpplan.errors import GateFailed
from fsdpplan.validate.calibrate_levels import LevelFit
from fsdpplan.validate.gates import Gate


def calibration_json(fitted: Fitted) -> str:
    """The measured numbers with their errors, and where they were written."""
    calibration = fitted.calibration
    before = fitted.measured.loaded.cluster.device
    return json.dumps(
        {
            "machine": asdict(calibration.machine),
            "start": fitted.measured.start.words,
            "device": {
                field: {**asdict(number), "before": had(before, field)}
                for field, number in calibration.device.numbers.items()
            },
            "evidence": calibration.cluster.device.evidence,
            "errors": asdict(calibration.cluster.device.error),
            "levels": [
                {"name": level.name, "measured": None if fit is None else _level(fit)}
                for level, fit in zip(calibration.cluster.levels, calibration.levels, strict=True)
            ],
            "calls": [asdict(call) for call in calibration.calls],
            "notes": list(calibration.notes),
            "profile": str(fitted.place),
            "log": str(fitted.measured.log),
        },
        indent=2,
        allow_nan=False,
    )


def _level(fit: LevelFit) -> dict[str, Any]:
    return {
        "numbers": {
            name: {"value": getattr(fit.level, name), "error_fraction": found.error_fraction}
            for name, found in fit.numbers.items()
        },
        "port_bandwidth_bytes_per_second": fit.level.port_bandwidth_bytes_per_second,
        "residual_fraction": fit.residual_fraction,
        "rows": fit.rows,
        "largest_bytes": fit.largest_bytes,
    }


def check_json(checked: Checked, failure: GateFailed | None) -> str:
    """Every comparison, and what is slow."""
    document: dict[str, Any] = {
        "machine": asdict(checked.measured.machine),
        "profile": checked.measured.start.words,
        "tolerance": checked.tolerance,
        "gates": [_gate(gate) for gate in checked.gates],
        "slow": [_gate(gate) for gate in checked.slow],
        "log": str(checked.measured.log),
    }
    if failure is not None:
        document["error"] = {
            "kind": type(failure).__name__,
            "message": str(failure),
            "exit_code": failure.exit_code,
        }
    return json.dumps(document, indent=2, allow_nan=False)


def _gate(gate: Gate) -> dict[str, Any]:
    return {
        "name": f"{gate.where}: {gate.what}",
        "kind": gate.kind,
        "against": gate.against,
        "value": gate.factor,
        "limit": gate.limit,
        "passed": gate.passed,
        "rows": gate.rows,
    }
