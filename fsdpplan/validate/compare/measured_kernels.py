"""Measured kernels: what the cost model says of each timed kernel of one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median

from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.kernels.attention import attention_backward_seconds, attention_forward_seconds
from fsdpplan.cost.kernels.rates import (
    matmul_flops,
    matmul_seconds,
    memory_bytes_per_second,
)
from fsdpplan.cost.model.attention_kernel import AttentionKernel, has_asynchronous_cores
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.measurement import (
    MeasuredAttention,
    MeasuredCopy,
    MeasuredLaunch,
    MeasuredMachine,
    MeasuredMatmul,
    MeasuredMemory,
    Measurement,
)
from fsdpplan.spec.model import Model

Kernel = MeasuredMatmul | MeasuredMemory | MeasuredAttention | MeasuredLaunch | MeasuredCopy

LONG_SECONDS = 1.0
"""A row that kept the device busy for so long shows what it sustains: power caps act in less."""
BURST_SECONDS = 0.1
"""Its first repeats, up to here, are a short benchmark."""
BURST_REPEATS = 5
"""Fewest repeats that tell its rate."""
LARGE_SHARE = 0.25
"""Element-wise kernels and copies of at least so much of the largest one show the bandwidth."""


def usable(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Rows without the repeats that a coarse clock saw take no time; none left: no row."""
    kept: list[Measurement] = []
    for row in measurements:
        if isinstance(row, MeasuredMachine) or all(row.seconds):
            kept.append(row)
        elif seconds := tuple(one for one in row.seconds if one):
            kept.append(replace(row, seconds=seconds))
    return [row for row in kept if isinstance(row, MeasuredMachine) or row.seconds]


def telling(rows: Sequence[Measurement]) -> list[Kernel]:
    """Kernels that show a rate: small transfers, and few launches in a row, show their start, and
    copies from memory that is not pinned the host's own."""
    traffic = max((row.traffic_bytes for row in rows if isinstance(row, MeasuredMemory)), default=0)
    copied = max(
        (row.copied_bytes for row in rows if isinstance(row, MeasuredCopy) and row.pinned),
        default=0,
    )
    launched = max((row.kernels for row in rows if isinstance(row, MeasuredLaunch)), default=0)
    kept: list[Kernel] = []
    for row in rows:
        match row:
            case MeasuredMemory() if row.traffic_bytes >= LARGE_SHARE * traffic:
                kept.append(row)
            case MeasuredCopy() if row.pinned and row.copied_bytes >= LARGE_SHARE * copied:
                kept.append(row)
            case MeasuredLaunch() if row.kernels == launched:
                kept.append(row)
            case MeasuredMatmul() | MeasuredAttention():
                kept.append(row)
            case _:
                pass
    return kept


def predicted_seconds(row: Kernel, device: Device) -> float:
    """Time of one repeat on a device that is not held to its power cap."""
    match row:
        case MeasuredMatmul():
            return matmul_seconds(m=row.m, n=row.n, k=row.k, dtype=row.dtype, device=device)
        case MeasuredMemory():
            return row.traffic_bytes / memory_bytes_per_second(device)
        case MeasuredAttention():
            return attention_seconds(row, device)
        case MeasuredLaunch():
            return row.kernels * device.fit.kernel_launch_seconds
        case MeasuredCopy():
            link = device.fit.host_link_fraction * device.host_link_bytes_per_second
            return row.copied_bytes / link


def attention_seconds(row: MeasuredAttention, device: Device) -> float:
    """Fused causal attention alone, at the rate of a short benchmark."""
    fresh = replace(device, fit=replace(device.fit, sustained_fraction=1.0))
    work = _attention_work(row, timed_kernel(device))
    if row.direction == "forward":
        return attention_forward_seconds(work, fresh)
    return attention_backward_seconds(work, fresh)


def timed_kernel(device: Device) -> AttentionKernel:
    """What torch's attention is timed with, of a release that tries cuDNN's first."""
    return "cudnn" if has_asynchronous_cores(device) else "flash"


@lru_cache(maxsize=256)
def _attention_work(row: MeasuredAttention, kernel: AttentionKernel) -> BlockWork:
    """A block that has this attention; its other widths do not matter to it."""
    width = row.heads * row.head_dim
    model = Model(
        name="measured",
        layers=1,
        hidden=width,
        ffn_hidden=width,
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        vocab=1,
        positions="learned",
    )
    return BlockWork(
        model=model,
        tokens=row.batch * row.seq_len,
        seq_len=row.seq_len,
        tp=1,
        sequence_parallel=False,
        precision=row.dtype,
        mode="none",
        compiled=False,
        autocast=False,
        residual_bytes=2,
        wrapper_operators=0.0,
        attention_kernel=kernel,
        family="own",
    )


def matmul_rate(row: MeasuredMatmul) -> float:
    """FLOPs a second that were reached."""
    return matmul_flops(m=row.m, n=row.n, k=row.k) / burst_seconds(row.seconds)


def burst_seconds(seconds: Sequence[float]) -> float:
    """One repeat while the device was fresh: the median of all, of a long row of the first ones."""
    first = _first(seconds) if is_long(seconds) else seconds
    return median(first)


def is_long(seconds: Sequence[float]) -> bool:
    """Whether a row shows what the device sustains."""
    return sum(seconds) >= LONG_SECONDS and len(_first(seconds)) >= BURST_REPEATS


def sustained_fraction(seconds: Sequence[float], short_seconds: float | None) -> float:
    """Rate of the second half of a long row as a share of that of a short one; None: as a share of
    that of its own first repeats."""
    fresh = median(_first(seconds)) if short_seconds is None else short_seconds
    return min(1.0, fresh / median(seconds[len(seconds) // 2 :]))


def _first(seconds: Sequence[float]) -> Sequence[float]:
    spent = 0.0
    for index, one in enumerate(seconds):
        spent += one
        if spent > BURST_SECONDS:
            return seconds[:index]
    return seconds
