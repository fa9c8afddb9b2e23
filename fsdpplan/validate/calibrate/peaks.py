"""Peaks: what torch reports of a device, and how its fastest kernels stand to its data sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import TypeVar

from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.measurement import MeasuredMachine, MeasuredMatmul, MeasuredMemory
from fsdpplan.validate.compare.measured_kernels import Kernel, matmul_rate

OVER_PEAK = 1.05
"""A device that is faster than its peak by more is not the one that the profile describes."""
DIGITS = 4
"""Significant digits of a measured number."""

Row = TypeVar("Row", bound=Kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNumber:
    """One number that was measured."""

    value: float
    error_fraction: float
    """Standard error of its logarithm."""
    spread_fraction: float
    """How far the rank that is furthest from the others' median is from it."""
    residual_fraction: float
    """Root mean square of log(predicted / measured) of its rows."""
    rows: int


def reported(machine: MeasuredMachine) -> dict[str, DeviceNumber]:
    """What torch says of a GPU; a CPU has neither."""
    said = {"memory_bytes": machine.memory_bytes, "multiprocessors": machine.multiprocessors}
    return {field: _exact(value) for field, value in said.items() if value is not None}


def _exact(value: float) -> DeviceNumber:
    return DeviceNumber(
        value=value, error_fraction=0.0, spread_fraction=0.0, residual_fraction=0.0, rows=1
    )


def best_rates(
    matmuls: Sequence[MeasuredMatmul], memory: Sequence[MeasuredMemory]
) -> dict[str, DeviceNumber]:
    """A CPU process has no data sheet: its peak is the best that was measured, on the rank in the
    middle, and the fitted shares are relative to that."""
    peaks = {}
    for dtype in ("bf16", "fp16", "fp32"):
        best = _best([row for row in matmuls if row.dtype == dtype], matmul_rate)
        if best is not None:
            peaks[f"peak_{dtype}_flops_per_second"] = best
    best = _best(memory, _memory_rate)
    if best is not None:
        peaks["memory_bandwidth_bytes_per_second"] = best
    return peaks


def _best(rows: Sequence[Row], rate: Callable[[Row], float]) -> DeviceNumber | None:
    best_of = [max(map(rate, mine)) for mine in by_rank(rows).values()]
    if not best_of:
        return None
    middle = median(best_of)
    return DeviceNumber(
        value=rounded(middle),
        error_fraction=0.0,
        spread_fraction=max(abs(log(one / middle)) for one in best_of),
        residual_fraction=0.0,
        rows=len(rows),
    )


def _memory_rate(row: MeasuredMemory) -> float:
    return row.traffic_bytes / median(row.seconds)


def refuse_other_devices(
    matmuls: Sequence[MeasuredMatmul], memory: Sequence[MeasuredMemory], device: Device
) -> None:
    """Rates above the data sheet's: the profile is not of this device."""
    for dtype in {row.dtype for row in matmuls}:
        peak = device.peak_flops_per_second(dtype)
        best = max(matmul_rate(row) for row in matmuls if row.dtype == dtype)
        if best > OVER_PEAK * peak:
            _refuse(device, f"a {dtype} matmul", best / 1e12, peak / 1e12, "TFLOP/s")
    if memory:
        peak, best = device.memory_bandwidth_bytes_per_second, max(map(_memory_rate, memory))
        if best > OVER_PEAK * peak:
            _refuse(device, "an element-wise kernel", best / 1e9, peak / 1e9, "GB/s")


def _refuse(device: Device, what: str, best: float, peak: float, unit: str) -> None:
    raise SpecError(
        f"{what} ran at {best:,.0f} {unit}, more than the peak of {peak:,.0f} that {device.name} "
        "has: this is another device; name its profile with --hardware (`fsdpplan profiles`)"
    )


def by_rank(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows of each rank."""
    ranks: dict[int, list[Row]] = {}
    for row in rows:
        ranks.setdefault(row.rank, []).append(row)
    return ranks


def rounded(value: float) -> float:
    """In `DIGITS` digits."""
    return float(f"{value:.{DIGITS}g}")
