"""Achieved: what the cost model takes a device to reach, beside its peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.spec.cluster import Device

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
