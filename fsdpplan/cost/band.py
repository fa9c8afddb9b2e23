"""Band: how far a predicted step time may be off, and whether two predictions can be told apart.

A step is a sum of parts of different kinds: kernels, exposed collectives, launches, the pipeline's
bubble. Each kind has an error of its own, and the part of a step that it makes up carries that
error into the whole. A layout that is nearly all matmuls is therefore known better than one that
waits for the network, and errors that two layouts share cancel in their difference.

    error(T)^2      = stack^2 + base^2 + sum over kinds k of (share_k * error_k)^2
    error(Ta/Tb)^2  = layout^2 + sum over kinds k of ((share_a,k - share_b,k) * error_k)^2

Errors are standard deviations of log time, fitted to residuals of projects that were held back
(`docs/explanation/validation.md`); the parts' errors are taken as independent.

Peak band: how far the peak of device memory may be off, and the chance that a layout fits.

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

from dataclasses import dataclass, replace
from functools import lru_cache
from math import erf, exp, hypot, log, sqrt
from typing import Protocol

from fsdpplan.spec.cluster import Cluster, Device, Level, StepError
from fsdpplan.spec.plan import Interval, MemoryBreakdown, TimeBreakdown
from fsdpplan.spec.runtime import StackFamily
from fsdpplan.spec.training import Training

NORMAL_80 = 1.2816
"""Standard deviations on each side that hold 80 % of a normal distribution."""

MOST_INDISTINGUISHABLE_FRACTION = 0.03
"""Layouts further apart than this are always ranked by their step time, however large the error of
their difference: the faster one is the better guess, and simplicity may cost no more."""


class Timed(Protocol):
    """What has a step time with its parts: an estimate, or what is predicted of a measured run."""

    @property
    def time(self) -> TimeBreakdown:
        """The parts."""


def step_shares(time: TimeBreakdown) -> dict[str, float]:
    """Share of each kind of part in the step; they add up to 1."""
    total = time.total_seconds
    in_kernels = time.matmul_seconds + time.attention_seconds + time.launch_seconds
    kinds = {
        "matmul": time.matmul_seconds,
        "attention": time.attention_seconds,
        "element_wise": time.compute_seconds
        - in_kernels
        + time.optimizer_seconds
        + time.host_seconds,
        "launch": time.launch_seconds,
        "inside": time.exposed_inside_seconds,
        "across": time.exposed_across_seconds,
        "bubble": time.bubble_seconds,
    }
    return {kind: seconds / total for kind, seconds in kinds.items()}


def error_of(cluster: Cluster, family: StackFamily) -> StepError:
    """Errors of a step there for softwares of that family: that of the stack is known where the
    stack was measured, our own trainer's on one GPU."""
    error = cluster.device.error
    if family != "own" or cluster.gpus > 1 or not error.own_stack_fraction:
        return error
    return replace(error, stack_fraction=error.own_stack_fraction)


def kind_errors(error: StepError) -> dict[str, float]:
    """Standard deviation of log time of each kind of part."""
    return {
        "matmul": error.matmul_fraction,
        "attention": error.attention_fraction,
        "element_wise": error.element_wise_fraction,
        "launch": error.launch_fraction,
        "inside": error.inside_fraction,
        "across": error.across_fraction,
        "bubble": error.bubble_fraction,
    }


def log_error(time: TimeBreakdown, error: StepError) -> float:
    """Standard deviation of the logarithm of the step time."""
    errors = kind_errors(error)
    parts = ((share * errors[kind]) ** 2 for kind, share in step_shares(time).items())
    return sqrt(error.stack_fraction**2 + error.base_fraction**2 + sum(parts))


def step_interval(time: TimeBreakdown, error: StepError) -> Interval:
    """The step time with its 80 % band."""
    factor = exp(NORMAL_80 * log_error(time, error))
    expected = time.total_seconds
    return Interval(lower=expected / factor, expected=expected, upper=expected * factor)


def widened(interval: Interval, log_error: float) -> Interval:
    """`interval` with one more error, independent of what it has: squares add."""
    own = log(interval.upper / interval.expected) / NORMAL_80
    factor = exp(NORMAL_80 * sqrt(own**2 + log_error**2))
    return replace(interval, lower=interval.expected / factor, upper=interval.expected * factor)


def difference_log_error(one: TimeBreakdown, other: TimeBreakdown, error: StepError) -> float:
    """Standard deviation of the logarithm of the ratio of two step times."""
    errors = kind_errors(error)
    shares, others = step_shares(one), step_shares(other)
    parts = (((shares[kind] - others[kind]) * errors[kind]) ** 2 for kind in shares)
    return sqrt(error.layout_fraction**2 + sum(parts))


def difference_fraction(one: Timed, other: Timed, *, cluster: Cluster) -> float:
    """Error of the difference of two layouts, as a share of the step time.

    The 80 % half-width of the ratio of their step times.
    """
    width = NORMAL_80 * difference_log_error(one.time, other.time, cluster.device.error)
    return exp(width) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A predicted step, and what its errors are errors of."""

    time: TimeBreakdown
    cluster: Cluster
    training: Training


def ratio_log_error(one: Step, other: Step) -> float:
    """Standard deviation of the logarithm of the ratio of two steps, of two questions.

    What is the same in both cancels, and nothing else: on one device under one software the error
    of the stack and those of kinds of parts, by the difference of their shares, as between two
    layouts of one question. Links of another speed have an error of their own, and so have matmuls
    in another number format: there

        (share_a error)^2 + (share_b error)^2    in place of    ((share_a - share_b) error)^2

    Of two devices or softwares nothing is taken to cancel, which can only be too careful.
    """
    first, second = (error_of(s.cluster, s.training.family) for s in (one, other))
    if not _is_one_stack(one, other):
        return hypot(log_error(one.time, first), log_error(other.time, second))
    errors = kind_errors(first)
    shares, others = step_shares(one.time), step_shares(other.time)
    own = _own_errors(one, other)
    parts = (
        hypot(shares[kind], others[kind]) if kind in own else shares[kind] - others[kind]
        for kind in shares
    )
    squares = ((part * errors[kind]) ** 2 for kind, part in zip(shares, parts, strict=True))
    return sqrt(first.layout_fraction**2 + sum(squares))


def _is_one_stack(one: Step, other: Step) -> bool:
    devices = [replace(step.cluster.device, learned_peaks=None) for step in (one, other)]
    return devices[0] == devices[1] and one.training.runtime == other.training.runtime


def _own_errors(one: Step, other: Step) -> frozenset[str]:
    """Kinds of parts whose errors the two steps do not share."""
    mine, theirs = ([_links(level) for level in step.cluster.levels] for step in (one, other))
    found = set()
    if mine[:1] != theirs[:1]:
        found.add("inside")
    # a cluster of fewer nodes has the same links, as far as it goes
    if any(level != same for level, same in zip(mine[1:], theirs[1:], strict=False)):
        found.add("across")
    if one.training.precision != other.training.precision:
        found |= {"matmul", "attention"}
    return frozenset(found)


def _links(level: Level) -> Level:
    """`level`, however many GPUs of the job it joins."""
    return replace(level, domain_gpus=1, whole_gpus=None)


def faster_chance(*, ratio: float, log_error: float) -> float:
    """Chance that a step which is predicted to take `ratio` of another's time is the faster."""
    if not log_error:
        return 0.5 if ratio == 1 else float(ratio < 1)
    return _normal(-log(ratio) / log_error)


def tie_fraction(error_fraction: float) -> float:
    """Up to which share of the step time a slower layout is not told apart from the fastest."""
    return min(error_fraction, MOST_INDISTINGUISHABLE_FRACTION)


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


def expected_peak_bytes(memory: MemoryBreakdown, device: Device) -> float:
    """Of the fullest device, as measured runs say where there are some."""
    return peak_factor(device) * memory.peak_device_bytes


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
