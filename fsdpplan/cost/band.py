"""Band: how far a predicted step time may be off, and whether two predictions can be told apart.

A step is a sum of parts of different kinds: kernels, exposed collectives, launches, the pipeline's
bubble. Each kind has an error of its own, and the part of a step that it makes up carries that
error into the whole. A layout that is nearly all matmuls is therefore known better than one that
waits for the network, and errors that two layouts share cancel in their difference.

    error(T)^2      = stack^2 + base^2 + sum over kinds k of (share_k * error_k)^2
    error(Ta/Tb)^2  = layout^2 + sum over kinds k of ((share_a,k - share_b,k) * error_k)^2

Errors are standard deviations of log time, fitted to residuals of projects that were held back
(`docs/explanation/validation.md`); the parts' errors are taken as independent.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt
from typing import Protocol

from fsdpplan.spec.cluster import Cluster, StepError
from fsdpplan.spec.estimate import Interval, TimeBreakdown

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


def tie_fraction(error_fraction: float) -> float:
    """Up to which share of the step time a slower layout is not told apart from the fastest."""
    return min(error_fraction, MOST_INDISTINGUISHABLE_FRACTION)
