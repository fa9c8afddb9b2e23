"""Peak band: how far the peak of device memory may be off, and the chance that a layout fits.

    error^2 = stack^2 + base^2 (+ unknown^2, of a run whose row leaves something open)
    chance  = Phi(log(memory of the device / expected peak) / error)

Errors are standard deviations of the log of the peak, and the same for all layouts of a device. So
the chance falls with the expected peak alone, and asking for one is asking for a smaller device:

    expected peak <= memory of the device * exp(-z error)

with z the quantile of that chance: what search rules out by a lower bound of the peak, stays out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import erf, exp, hypot, log, sqrt

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.spec.cluster import Device, DeviceFit
from fsdpplan.spec.estimate import Interval, MemoryBreakdown

EVEN = 0.5
"""Chance from which on up the band asks for more room than the expected peak."""


def peak_log_error(fit: DeviceFit) -> float:
    """Standard deviation of the logarithm of a rank's peak."""
    return hypot(fit.peak_memory_stack_fraction, fit.peak_memory_base_fraction)


def fits_fraction(*, peak_bytes: float, device: Device, unknown_log_error: float = 0.0) -> float:
    """Chance that a peak which is expected to be `peak_bytes` stays within the memory of a device
    whose error is known."""
    error = hypot(peak_log_error(device.fit), unknown_log_error)
    return _normal(log(device.memory_bytes / peak_bytes) / error)


def most_bytes(*, device: Device, fits_fraction: float) -> int:
    """The highest expected peak that has that chance to fit; all of the device up to an even
    one, where it is the expected peak that decides."""
    if fits_fraction <= EVEN:
        return device.memory_bytes
    return int(device.memory_bytes * exp(-_quantile(fits_fraction) * peak_log_error(device.fit)))


def peak_interval(*, peak_bytes: float, device: Device, unknown_log_error: float = 0.0) -> Interval:
    """The peak with its 80 % band."""
    factor = exp(NORMAL_80 * hypot(peak_log_error(device.fit), unknown_log_error))
    ends = (peak_bytes / factor, peak_bytes, peak_bytes * factor)
    lower, expected, upper = (float(round(end)) for end in ends)
    return Interval(lower=lower, expected=expected, upper=upper)


def with_band(
    memory: MemoryBreakdown, *, device: Device, unknown_log_error: float = 0.0
) -> MemoryBreakdown:
    """`memory` with the band of its peak and the chance that it fits; as it is where nothing is
    known of how far peaks are off, as of CPU processes."""
    peak = memory.peak_device_bytes
    if not peak_log_error(device.fit):
        return memory
    return replace(
        memory,
        peak_device_band_bytes=peak_interval(
            peak_bytes=peak, device=device, unknown_log_error=unknown_log_error
        ),
        fits_fraction=fits_fraction(
            peak_bytes=peak, device=device, unknown_log_error=unknown_log_error
        ),
    )


def _normal(deviations: float) -> float:
    """Share of a normal distribution below so many standard deviations."""
    return (1 + erf(deviations / sqrt(2))) / 2


@lru_cache(maxsize=64)
def _quantile(share: float) -> float:
    """Standard deviations below which that share lies."""
    from statistics import NormalDist  # not at start-up

    return NormalDist().inv_cdf(share)
