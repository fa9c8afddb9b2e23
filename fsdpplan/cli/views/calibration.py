"""What `calibrate` prints: links, calls and the device as measured; or every comparison."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, NotRequired, TypedDict

from fsdpplan.cli.resolve.calibration import Checked, Fitted, machine_words
from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.errors import ErrorJson, GateFailed, error_document
from fsdpplan.spec.cluster import Device, Evidence, StepError
from fsdpplan.spec.measurement import MeasuredMachine
from fsdpplan.units import (
    format_bandwidth,
    format_count,
    format_gib,
    format_percent,
    format_seconds,
)
from fsdpplan.validate.calibrate.levels import LevelFit
from fsdpplan.validate.calibrate.peaks import DeviceNumber
from fsdpplan.validate.compare.alpha_beta import CallFit
from fsdpplan.validate.compare.gates import Against, Gate, GateKind

NAMES = {
    "memory_bytes": "memory",
    "multiprocessors": "multiprocessors",
    "peak_bf16_flops_per_second": "bf16 peak",
    "peak_fp16_flops_per_second": "fp16 peak",
    "peak_fp32_flops_per_second": "fp32 peak",
    "memory_bandwidth_bytes_per_second": "memory bandwidth",
    "memory_fraction": "memory share",
    "matmul_fraction": "matmul share",
    "fp8_fraction": "fp8 share",
    "attention_forward_fraction": "attention share",
    "attention_backward_ratio": "backward share",
    "native_attention_ratio": "cuDNN attention",
    "native_backward_ratio": "cuDNN backward share",
    "kernel_launch_seconds": "kernel launch",
    "unaligned_fraction": "unaligned share",
    "host_link_fraction": "host link share",
    "sustained_fraction": "sustained share",
}

MOST_CALLS = 24
"""Lines of calls; JSON has all."""


def calibration_screen(fitted: Fitted, *, width: int) -> str:
    """Levels, calls, device, and what to know."""
    calibration = fitted.calibration
    start = fitted.measured.start.words
    return blocks(
        wrapped(
            f"{machine_words(calibration.machine)}. What was not measured is as {start} has it.",
            width=width,
        ),
        _titled("Links, one GPU and one direction", _levels(fitted, width)),
        _titled("Calls", _calls(calibration.calls, width)),
        _titled("Device", _device(fitted, width)),
        listed("To know", calibration.notes, width=width),
    )


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text}" if text else ""


def _levels(fitted: Fitted, width: int) -> str:
    calibration = fitted.calibration
    rows, inner_gpus = [], 1
    for level, fit in zip(calibration.cluster.levels, calibration.levels, strict=True):
        if fit is not None:
            rows.append(_level(fit, inner_gpus))
        inner_gpus = level.domain_gpus
    headers = ("level", "hop", "start", "bandwidth", "half at", "error", "calls")
    align = ("left", *["right"] * 6)
    return table(rows, headers=headers, align=align, width=width) if rows else ""


def _level(fit: LevelFit, inner_gpus: int) -> tuple[str, ...]:
    level = fit.level
    ports = level.ports * level.port_bandwidth_bytes_per_second
    return (
        level.name,
        format_seconds(level.latency_seconds),
        format_seconds(level.base_seconds),
        format_bandwidth(ports * level.bandwidth_fraction / inner_gpus),
        format_gib(level.half_bandwidth_bytes),
        format_percent(fit.residual_fraction),
        str(fit.rows),
    )


def _calls(calls: tuple[CallFit, ...], width: int) -> str:
    rows = [
        (
            f"{call.collective} {call.axis or call.group}",
            str(call.ranks),
            format_seconds(call.fit.latency_seconds),
            format_bandwidth(call.fit.bandwidth_bytes_per_second),
            format_gib(call.fit.ramp_bytes),
            format_percent(call.fit.error_fraction),
        )
        for call in calls[:MOST_CALLS]
    ]
    headers = ("call", "ranks", "latency", "bandwidth", "ramp", "error")
    align = ("left", *["right"] * 5)
    return table(rows, headers=headers, align=align, width=width) if rows else ""


def _device(fitted: Fitted, width: int) -> str:
    before = fitted.measured.loaded.cluster.device
    rows = [
        (
            NAMES[field],
            shown(field, had(before, field)),
            shown(field, number.value),
            *_quality(number),
        )
        for field, number in fitted.calibration.device.numbers.items()
    ]
    headers = ("", "profile", "measured", "error", "ranks", "rows")
    align = ("left", *["right"] * 5)
    return table(rows, headers=headers, align=align, width=width) if rows else ""


def _quality(number: DeviceNumber) -> tuple[str, str, str]:
    if number.rows == 1 and not number.error_fraction:
        return "", "", ""
    return (
        format_percent(number.residual_fraction),
        format_percent(number.spread_fraction),
        str(number.rows),
    )


def had(device: Device, field: str) -> float:
    """What the profile has for a field of the device or of its fit."""
    return float(getattr(device.fit if hasattr(device.fit, field) else device, field))


def shown(field: str, value: float) -> str:
    """A number of the device in its unit."""
    if field.endswith("_bytes_per_second"):
        return format_bandwidth(value)
    if field.endswith("_flops_per_second"):
        return f"{format_count(value)}FLOP/s"
    if field.endswith("_bytes"):
        return format_gib(value)
    if field.endswith("_seconds"):
        return format_seconds(value)
    return format_percent(value) if value < 2 else f"{value:.0f}"


def check_screen(checked: Checked, *, width: int) -> str:
    """All that is slow; then of every other kind of part the one nearest to its limit."""
    machine = checked.measured.machine
    slow = [gate for gate in checked.gates if not gate.passed]
    return blocks(
        wrapped(
            f"{machine_words(machine)}. {len(checked.gates)} comparisons with "
            f"{checked.measured.start.words} and among equals, {len(slow)} past their limit.",
            width=width,
        ),
        _titled("Slow", _gates(slow, width)),
        _titled("Healthy, the nearest to its limit of each kind", _gates(_nearest(checked), width)),
    )


def _gates(gates: list[Gate], width: int) -> str:
    rows = [
        (gate.where, gate.what, gate.against, f"{gate.factor:.2f}x", f"{gate.limit:.2f}x")
        for gate in gates
    ]
    headers = ("where", "what", "against", "time", "limit")
    align = ("left", "left", "left", "right", "right")
    return table(rows, headers=headers, align=align, width=width) if rows else ""


def _nearest(checked: Checked) -> list[Gate]:
    nearest: dict[tuple[str, str], Gate] = {}
    for gate in checked.gates:
        key = (gate.kind, gate.what)
        if gate.passed and (key not in nearest or _share(gate) > _share(nearest[key])):
            nearest[key] = gate
    return list(nearest.values())


def _share(gate: Gate) -> float:
    return gate.factor / gate.limit


class BeforeJson(TypedDict):
    """Beside a number of the device that was measured."""

    before: float
    """What the profile had that it started from."""


class LevelNumberJson(TypedDict):
    """A number of a level."""

    value: float
    error_fraction: float
    """Standard error of its logarithm."""


class MeasuredLevelJson(TypedDict):
    """What was measured of one level."""

    numbers: dict[str, LevelNumberJson]
    """By field of a level."""
    port_bandwidth_bytes_per_second: float
    residual_fraction: float
    rows: int
    largest_bytes: int


class LevelJson(TypedDict):
    """A level of the cluster; null: it was not measured."""

    name: str
    measured: MeasuredLevelJson | None


class CalibrationJson(TypedDict):
    """What `calibrate --json` prints."""

    machine: Annotated[dict[str, Any], MeasuredMachine]
    start: str
    """The profile that it started from."""
    device: dict[str, Annotated[dict[str, Any], DeviceNumber, BeforeJson]]
    """By field of a device, or of its fit."""
    evidence: Evidence
    errors: Annotated[dict[str, Any], StepError]
    levels: list[LevelJson]
    """Innermost first."""
    calls: list[Annotated[dict[str, Any], CallFit]]
    notes: list[str]
    profile: str
    """The file that was written."""
    log: str


def calibration_json(fitted: Fitted) -> str:
    """The measured numbers with their errors, and where they were written."""
    calibration = fitted.calibration
    before = fitted.measured.loaded.cluster.device
    document: CalibrationJson = {
        "machine": asdict(calibration.machine),
        "start": fitted.measured.start.words,
        "device": {
            field: {**asdict(number), "before": had(before, field)}
            for field, number in calibration.device.numbers.items()
        },
        "evidence": calibration.cluster.device.evidence,
        "errors": asdict(calibration.cluster.device.error),
        "levels": [
            {"name": level.name, "measured": None if fit is None else _level_document(fit)}
            for level, fit in zip(calibration.cluster.levels, calibration.levels, strict=True)
        ],
        "calls": [asdict(call) for call in calibration.calls],
        "notes": list(calibration.notes),
        "profile": str(fitted.place),
        "log": str(fitted.measured.log),
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _level_document(fit: LevelFit) -> MeasuredLevelJson:
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


class GateJson(TypedDict):
    """What one part took over what was expected of it."""

    name: str
    kind: GateKind
    against: Against
    """Whose time is expected: the profile's, or that of its healthy equals."""
    value: float
    limit: float
    passed: bool
    rows: int


class CalibrateCheckJson(TypedDict):
    """What `calibrate --check --json` prints."""

    machine: Annotated[dict[str, Any], MeasuredMachine]
    profile: str
    tolerance: float
    gates: list[GateJson]
    slow: list[GateJson]
    """Those that did not pass, without what follows from others."""
    log: str
    error: NotRequired[ErrorJson]
    """Where something is slow."""


def check_json(checked: Checked, failure: GateFailed | None) -> str:
    """Every comparison, and what is slow."""
    document: CalibrateCheckJson = {
        "machine": asdict(checked.measured.machine),
        "profile": checked.measured.start.words,
        "tolerance": checked.tolerance,
        "gates": [_gate_document(gate) for gate in checked.gates],
        "slow": [_gate_document(gate) for gate in checked.slow],
        "log": str(checked.measured.log),
    }
    if failure is not None:
        document["error"] = error_document(failure)
    return json.dumps(document, indent=2, allow_nan=False)


def _gate_document(gate: Gate) -> GateJson:
    return {
        "name": f"{gate.where}: {gate.what}",
        "kind": gate.kind,
        "against": gate.against,
        "value": gate.factor,
        "limit": gate.limit,
        "passed": gate.passed,
        "rows": gate.rows,
    }
