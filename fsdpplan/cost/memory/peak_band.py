"""Peak band: how far the peak of device memory may be off, and the chance that a layout fits.

    error^2  = stack^2 + base^2 (+ unknown^2, of a run whose row leaves something open)
    expected = predicted peak * exp(shift)
    chance   = Phi(log(memory of the device / expected) / error)

Errors are standard deviations of the log of the peak, and the same for all layouts of a device.
`shift` is 0, and `stack` that of the profile, unless measured runs say otherwise: of what is the
same for all layouts, too (`validate/learn/peaks.py`). So the chance falls with the predicted peak
alone, and asking for one is asking for a smaller device:

    predicted peak <= memory of the device * exp(-shift - z error)

with z the quantile of that chance: what search rules out by a lower bound of the peak, stays out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import erf, exp, hypot, log, sqrt

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.estimate import Interval, MemoryBreakdown

EVEN = 0.5
"""Chance from which on up the band asks for more room than the expected peak."""


def peak_log_error(device: Device) -> float:
    """Standard deviation of the logarithm of a rank's peak."""
    learned, fit = device.learned_peaks, device.fit
    stack = fit.peak_memory_stack_fraction if learned is None else learned.stack_fraction
    return hypot(stack, fit.peak_memory_base_fraction)


def peak_factor(device: Device) -> float:
    """Expected over predicted peak: 1 where no measured runs say otherwise."""
    return 1.0 if device.learned_peaks is None else exp(device.learned_peaks.shift_log)


def fits_fraction(*, peak_bytes: float, device: Device, unknown_log_error: float = 0.0) -> float:
    """Chance that a peak which is predicted to be `peak_bytes` stays within the memory of a device
    whose error is known."""
    error = hypot(peak_log_error(device), unknown_log_error)
    return _normal(log(device.memory_bytes / (peak_bytes * peak_factor(device))) / error)


def most_bytes(*, device: Device, fits_fraction: float) -> int:
    """The highest predicted peak that has that chance to fit; up to an even one it is the expected
    peak that decides."""
    expected = device.memory_bytes / peak_factor(device)
    if fits_fraction <= EVEN:
        return int(expected)
    return int(expected * exp(-_quantile(fits_fraction) * peak_log_error(device)))


def peak_interval(*, peak_bytes: float, device: Device, unknown_log_error: float = 0.0) -> Interval:
    """The expected peak with its 80 % band."""
    factor = exp(NORMAL_80 * hypot(peak_log_error(device), unknown_log_error))
    peak = peak_bytes * peak_factor(device)
    ends = (peak / factor, peak, peak * factor)
    lower, expected, upper = (float(round(end)) for end in ends)
    return Interval(lower=lower, expected=expected, upper=upper)


def with_band(
    memory: MemoryBreakdown, *, device: Device, unknown_log_error: float = 0.0
) -> MemoryBreakdown:
    """`memory` with the band of its peak and the chance that it fits; as it is where nothing is
    known of how far peaks are off, as of CPU processes."""
    peak = memory.peak_device_bytes
    if not peak_log_error(device):
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
