"""Check a machine: is it as fast as its profile says, and which GPU or link is not.

Every kernel and call is compared with what the profile predicts for it, and every rank and every
link between neighbours with its equals. A part is slow where it is past the tolerance by more than
its noise; a profile that was not measured may be off by its own errors, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.measurement import (
    MeasuredAttention,
    MeasuredCall,
    MeasuredCopy,
    MeasuredLaunch,
    MeasuredMachine,
    MeasuredMatmul,
    MeasuredMemory,
    Measurement,
)
from fsdpplan.validate.calibrate.calibrated import as_measured, machine_of
from fsdpplan.validate.calibrate.check_links import link_gates
from fsdpplan.validate.compare.gates import (
    Gate,
    GateSubject,
    Timed,
    gate,
    middle,
    timed,
    undisturbed,
)
from fsdpplan.validate.compare.kernels import SMALLEST
from fsdpplan.validate.compare.measured_kernels import (
    Kernel,
    is_long,
    predicted_seconds,
    telling,
    usable,
)

PREDICTED_DTYPES = ("bf16", "fp8")
"""Of a GPU: formats whose rates a profile has by themselves; others are compared among ranks."""

Alike = dict[Kernel, dict[int, tuple[float, ...]]]
"""Repeats of each kernel by rank."""


def gates(
    measurements: Sequence[Measurement], cluster: Cluster, *, tolerance: float
) -> tuple[Gate, ...]:
    """All comparisons that the log allows; `tolerance` 0.2 is 20 % slower."""
    rows = usable(measurements)
    machine = machine_of(rows)
    measured = as_measured(cluster, machine)
    calls = [row for row in rows if isinstance(row, MeasuredCall) and row.ranks > 1]
    return (
        *_kernel_gates(telling(rows), measured, machine, tolerance),
        *link_gates(calls, measured, machine, tolerance=tolerance),
    )


def slow_parts(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """The gates that failed, without those that only wait for a part that is named: groups and
    levels for a link of two ranks, levels for a group."""
    slow = [one for one in gates if not one.passed]
    for kind, followers in (("pair", ("group", "level")), ("group", ("level",))):
        causes = [one.level for one in slow if one.kind == kind and one.level is not None]
        slow = [
            one
            for one in slow
            if one.kind not in followers or one.level is None or one.level < min(causes, default=99)
        ]
    return tuple(slow)


def _kernel_gates(
    rows: Sequence[Kernel], cluster: Cluster, machine: MeasuredMachine, tolerance: float
) -> Iterator[Gate]:
    """Of each part of a device: every rank beside its equals, and all beside the profile."""
    parts: dict[str, Alike] = {}
    for row in rows:
        kernels = parts.setdefault(_part(row, cluster.device), {})
        kernels.setdefault(replace(row, rank=0, seconds=()), {})[row.rank] = row.seconds
    for what, kernels in parts.items():
        yield from _rank_gates(what, kernels, machine, tolerance)
        yield from _device_gates(what, kernels, cluster.device, tolerance)


def _part(row: Kernel, device: Device) -> str:
    """What its time shows."""
    match row:
        case MeasuredMatmul():
            lasting = " for seconds" if is_long(row.seconds) and device.kind == "cuda" else ""
            return f"matmul{lasting}" if device.kind == "cpu" else f"{row.dtype} matmul{lasting}"
        case MeasuredMemory():
            return "memory"
        case MeasuredAttention():
            return f"attention {row.direction}"
        case MeasuredLaunch():
            return "kernel launches"
        case MeasuredCopy():
            return f"copies to {row.direction.rpartition('_')[2]}"


def _rank_gates(
    what: str, kernels: Alike, machine: MeasuredMachine, tolerance: float
) -> Iterator[Gate]:
    by_rank: dict[int, list[Timed]] = {}
    for ranks in kernels.values():
        expected = undisturbed(middle(ranks.values()))
        for rank, seconds in ranks.items() if len(ranks) > 1 else ():
            by_rank.setdefault(rank, []).append(timed(seconds, expected))
    for rank, own in sorted(by_rank.items()):
        host = machine.hosts[rank // machine.ranks_per_node]
        part = GateSubject(kind="rank", where=f"rank {rank} on host {host}", what=what)
        yield gate(part, own, tolerance=tolerance)


def _device_gates(what: str, kernels: Alike, device: Device, tolerance: float) -> Iterator[Gate]:
    """The rank in the middle beside the profile."""
    own = [
        timed(seconds, predicted_seconds(kernel, device))
        for kernel, ranks in kernels.items()
        if _is_predicted(kernel, seconds := middle(ranks.values()), device)
    ]
    if own:
        part = GateSubject(kind="device", where="all ranks", what=what)
        yield gate(part, own, tolerance=tolerance, allowance=_allowance(what, device))


def _is_predicted(kernel: Kernel, seconds: Sequence[float], device: Device) -> bool:
    """Whether a profile says how long it takes: for a GPU neither small products, formats that
    nobody trains in, nor what power allows in the long run."""
    if device.kind == "cpu" or not isinstance(kernel, MeasuredMatmul):
        return True
    return (
        kernel.dtype in PREDICTED_DTYPES
        and min(kernel.m, kernel.n, kernel.k) >= SMALLEST
        and not is_long(seconds)
        and (kernel.dtype != "fp8" or device.peak_fp8_flops_per_second is not None)
    )


def _allowance(what: str, device: Device) -> float:
    """How far a profile that was not measured may be off, in log time."""
    if device.evidence == "measured":
        return 0.0
    error = device.error
    kinds = {
        "memory": error.element_wise_fraction,
        "kernel launches": error.launch_fraction,
        "attention forward": error.attention_fraction,
        "attention backward": error.attention_fraction,
    }
    return NORMAL_80 * kinds.get(what, error.matmul_fraction)
