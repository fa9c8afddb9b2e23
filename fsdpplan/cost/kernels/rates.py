"""Rates: how fast a device multiplies matrices and moves memory.

Matmuls are priced by their shape: alignment is what those lose whose rows do not begin at multiples
of sixteen bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import expm1, inf
from typing import Literal

from fsdpplan.spec.cluster import Device
from fsdpplan.spec.runtime import StackFamily
from fsdpplan.spec.training import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of one block for one micro-batch on one rank.

    `forward`, `recompute` and `backward` are what the slower of device and host needs; the host's
    share stands beside them for whoever adds up stretches in which it runs ahead.
    """

    forward_seconds: float
    recompute_seconds: float
    """Forward work done again in backward by activation checkpointing."""
    backward_seconds: float
    """Without the recomputation."""
    forward_host_seconds: float = 0.0
    """What the host needs to dispatch the forward."""
    recompute_host_seconds: float = 0.0
    backward_host_seconds: float = 0.0
    forward_device_seconds: float = 0.0
    """What the device needs for the forward if nothing keeps it waiting."""
    recompute_device_seconds: float = 0.0
    backward_device_seconds: float = 0.0


def memory_bytes_per_second(device: Device) -> float:
    """What element-wise kernels reach of the memory bandwidth."""
    return device.memory_bandwidth_bytes_per_second * device.fit.memory_fraction


_TILES = ((256, 128), (128, 256), (192, 128), (128, 192), (128, 128))
"""Output tiles (rows, columns) that one multiprocessor computes at full rate: the large ones of
tensor-core libraries, which fit the measured shapes best (`matmul_fit` in the profiles)."""

_RESULT_BYTES = {"fp8": 2}
"""Products of 8-bit operands are written in 16 bits."""


def matmul_flops(*, m: int, n: int, k: int) -> int:
    """FLOPs of (m x k) @ (k x n): a multiplication and an addition for each product."""
    return 2 * m * n * k


def matmul_bytes(*, m: int, n: int, k: int, dtype: str) -> int:
    """Least memory traffic: both operands read and the result written once."""
    operand = DTYPE_BYTES[dtype]
    return (m * k + k * n) * operand + m * n * _RESULT_BYTES.get(dtype, operand)


@lru_cache(maxsize=4096)
def busy_waves(*, m: int, n: int, multiprocessors: int, wave_fraction: float) -> float:
    """Least multiprocessor time for the tiles of an m x n result, in elements of the result.

        waves = fraction * ceil(t / p) + (1 - fraction) * max(1, t / p)

    t tiles over p multiprocessors, for the tile shape that does it in the least time; edge tiles
    are computed whole. `wave_fraction` 1 is one whole tile at a time; less is for kernels that
    split the last tiles along k. One multiprocessor has no tiles: m * n.
    """
    if multiprocessors == 1:
        return float(m * n)
    least = inf
    for rows, columns in _TILES:
        tiles = -(-m // rows) * -(-n // columns)
        whole = -(-tiles // multiprocessors)
        waves = wave_fraction * whole + (1 - wave_fraction) * max(1.0, tiles / multiprocessors)
        least = min(least, waves * rows * columns)
    return least


def matmul_seconds(*, m: int, n: int, k: int, dtype: str, device: Device) -> float:
    """Time of (m x k) @ (k x n) on the device alone, without what the launch costs on the host.

        T = max(2 w (k + fill) / (peak * fraction / p), bytes / memory bandwidth) + start

    A roofline whose compute side counts whole tiles: w is the work of the busiest of p
    multiprocessors in elements of the result (`busy_waves`), and each tile pays for filling and
    draining its pipeline as if k were longer. Assumed away: cache reuse beyond one reading of each
    operand, and clocks that fall under long loads (`throttled_seconds`). fp8 is the product alone:
    casting and scaling its operands is traffic to be counted apart.
    """
    fit = device.fit
    multiprocessors = device.multiprocessors
    elements = busy_waves(
        m=m, n=n, multiprocessors=multiprocessors, wave_fraction=fit.matmul_wave_fraction
    )
    ceiling = fit.matmul_fraction * (fit.fp8_fraction if dtype == "fp8" else 1.0)
    rate = device.peak_flops_per_second(dtype) * ceiling / multiprocessors
    flops_seconds = 2 * elements * (k + fit.matmul_fill_depth) / rate
    memory = device.memory_bandwidth_bytes_per_second * fit.memory_fraction
    traffic_seconds = matmul_bytes(m=m, n=n, k=k, dtype=dtype) / memory
    return max(flops_seconds, traffic_seconds) + fit.matmul_start_seconds


def untiled(device: Device) -> Device:
    """`device` as one multiprocessor whose last wave is never empty: it has no tiles. It takes no
    longer for any shape, and for more rows no longer a row; with tiles the last of them may be
    nearly empty."""
    return replace(device, multiprocessors=1, fit=replace(device.fit, matmul_wave_fraction=0.0))


def has_tiles(device: Device) -> bool:
    """Whether groups of rows are computed in whole tiles: of a CPU's they are, too."""
    return device.multiprocessors > 1 or device.fit.matmul_wave_fraction > 0


def throttled_seconds(seconds: float, device: Device) -> float:
    """Time of a kernel on its own that takes `seconds` at the clock of a short one.

        T = t / (f + (1 - f) (τ / t) (1 - exp(-t / τ)))

    The power controller lowers the clock, with a time constant τ, to the share f at which the load
    stays within the limit; the rate is averaged over the kernel. A benchmark that repeats a product
    a few times shows a short one at full clock and a long one at the lowered. In a training step,
    which is long whatever its kernels, `sustained_fraction` stands for it.
    """
    fit = device.fit
    if not fit.throttle_seconds or not seconds:
        return seconds
    spans = seconds / fit.throttle_seconds
    fresh = -expm1(-spans) / spans
    return seconds / (fit.throttled_fraction + (1 - fit.throttled_fraction) * fresh)


ALIGNED_BYTES = 16
"""Rows of a matrix that start at multiples of this are loaded sixteen bytes at a time; others one
element at a time, by kernels of an older kind. Source: cuBLAS documentation, tensor core usage."""


def aligned_fraction(*widths: int, element_bytes: int, device: Device) -> float:
    """Rate of a matmul with matrices whose rows have so many elements as a share of an aligned
    one's. Of a projection and of both products of its backward they are n and k: its input and its
    weight have rows of k, its output of n, and so have their gradients; the tokens are never
    a row's."""
    aligned = all(width * element_bytes % ALIGNED_BYTES == 0 for width in widths)
    return 1.0 if aligned or device.kind == "cpu" else device.fit.unaligned_fraction


Unit = Literal["flops_per_second", "bytes_per_second"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """One rate of a device."""

    what: str
    """Kind of work, such as `bf16 matmul`."""
    unit: Unit
    peak: float
    """Of the data sheet."""
    alone: float
    """Of large kernels on their own."""
    in_step: float
    """The same in a long training step, which is held to the power cap."""


def achieved_rates(device: Device) -> tuple[Achieved, ...]:
    """Rates of large kernels.

        matmul:    peak * matmul_fraction [* fp8_fraction]
        attention: peak * attention_forward_fraction
        memory:    bandwidth * memory_fraction

    and all but memory's times `sustained_fraction` in a step. Those of small kernels are less:
    `fsdpplan.cost.kernels.matmul` and `fsdpplan.cost.kernels.attention` have what they lose.
    """
    fit = device.fit
    bandwidth = device.memory_bandwidth_bytes_per_second
    reached = bandwidth * fit.memory_fraction
    rates = [
        _computed(device, "bf16 matmul", "bf16", fit.matmul_fraction),
        _computed(device, "fp16 matmul", "fp16", fit.matmul_fraction),
        _computed(device, "bf16 attention", "bf16", fit.attention_forward_fraction),
    ]
    if device.peak_fp8_flops_per_second is not None:
        fraction = fit.matmul_fraction * fit.fp8_fraction
        rates.insert(2, _computed(device, "fp8 matmul", "fp8", fraction))
    memory = Achieved(
        what="memory", unit="bytes_per_second", peak=bandwidth, alone=reached, in_step=reached
    )
    return (*rates, memory)


def _computed(device: Device, what: str, dtype: str, fraction: float) -> Achieved:
    peak = device.peak_flops_per_second(dtype)
    return Achieved(
        what=what,
        unit="flops_per_second",
        peak=peak,
        alone=peak * fraction,
        in_step=peak * fraction * device.fit.sustained_fraction,
    )


@lru_cache(maxsize=64)
def in_family(device: Device, family: StackFamily) -> Device:
    """`device` with the rate that softwares of that family sustain."""
    sustained = device.fit.sustained(family)
    return replace(device, fit=replace(device.fit, sustained_fraction=sustained))
