"""Corrected: a cluster as its finished runs show it.

The correction changes the numbers that the cost model starts from and not the times that it ends
with: whether a collective is hidden depends on how long it takes beside what it hides behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fsdpplan.spec.cluster import Cluster, Device, Level, StepError
from fsdpplan.spec.correction import PARTS, Correction

LEAST_FRACTION = 1e-3
LONGEST_SECONDS = 0.5


def corrected(cluster: Cluster, correction: Correction, error: StepError) -> Cluster:
    """`cluster`, which was not corrected before, with these factors and errors of step times."""
    scaled = scaled_cluster(cluster, correction.factors)
    device = replace(scaled.device, error=error)
    return replace(scaled, device=device, correction=correction)


def uncorrected_levels(cluster: Cluster) -> tuple[Level, ...]:
    """The levels as the profile has them."""
    if cluster.correction is None:
        return cluster.levels
    back = {part: 1 / factor for part, factor in cluster.correction.factors.items()}
    return scaled_cluster(cluster, back).levels


def scaled_cluster(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """`cluster` with times of its parts multiplied; no rate gets above its datasheet's."""
    factor = {part: factors.get(part, 1.0) for part in PARTS}
    inner, *outer = cluster.levels
    levels = (
        _level(inner, factor["inside"]),
        *(_level(level, factor["across"]) for level in outer),
    )
    return replace(cluster, device=_device(cluster.device, factor), levels=levels)


def least_factors(cluster: Cluster) -> dict[str, float]:
    """The factors at which a rate is its datasheet's; below them nothing gets faster."""
    fit, (inner, *outer) = cluster.device.fit, cluster.levels
    return {
        "matmul": fit.matmul_fraction,
        "attention": fit.attention_forward_fraction,
        "element_wise": fit.memory_fraction,
        "launch": LEAST_FRACTION,
        "inside": _used(inner),
        "across": max(map(_used, outer), default=LEAST_FRACTION),
    }


def _used(level: Level) -> float:
    return max(level.bandwidth_fraction, level.multicast_fraction)


def _device(device: Device, factor: Mapping[str, float]) -> Device:
    fit = device.fit
    return replace(
        device,
        fit=replace(
            fit,
            matmul_fraction=_rate(fit.matmul_fraction, factor["matmul"]),
            attention_forward_fraction=_rate(fit.attention_forward_fraction, factor["attention"]),
            memory_fraction=_rate(fit.memory_fraction, factor["element_wise"]),
            kernel_launch_seconds=_delay(fit.kernel_launch_seconds, factor["launch"]),
        ),
    )


def _level(level: Level, factor: float) -> Level:
    return replace(
        level,
        bandwidth_fraction=_rate(level.bandwidth_fraction, factor),
        multicast_fraction=(
            _rate(level.multicast_fraction, factor) if level.multicast_fraction else 0.0
        ),
        latency_seconds=_delay(level.latency_seconds, factor),
        base_seconds=_delay(level.base_seconds, factor),
        start_seconds=_delay(level.start_seconds, factor),
    )


def _rate(fraction: float, factor: float) -> float:
    return min(1.0, max(LEAST_FRACTION, fraction / factor))


def _delay(seconds: float, factor: float) -> float:
    return min(LONGEST_SECONDS, seconds * factor)
