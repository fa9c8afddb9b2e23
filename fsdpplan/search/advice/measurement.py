"""Measurement: which unknown of a prediction most deserves to be measured, and by what.

An unknown is known give or take the error of its kind of part (`cost/band.py`), e. The step is
priced with it one standard deviation up and down,

    moves = (|log T(x exp(e)) / T(x)| + |log T(x exp(-e)) / T(x)|) / 2

which is its elasticity times its error where the step is smooth, and sees what a bandwidth would
expose that now hides. Measuring brings the error of the kind down to that of measured devices, e',
and takes moves(e)^2 - moves(e')^2 from the square of the step's error. The stack, your software on
your machines, is an unknown, too: a run of your own settles it up to what single steps are off by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Literal

from fsdpplan.cost.band import NORMAL_80, error_of, log_error
from fsdpplan.cost.estimate import estimate
from fsdpplan.errors import SpecError
from fsdpplan.search.advice.sensitivity import rates_and_constants, with_value
from fsdpplan.spec.cluster import StepError
from fsdpplan.spec.plan import Case, Interval

Means = Literal["calibrate", "calibrate between nodes", "run"]
"""What measures it: a calibration of one node, one of several, a run of the plan."""

LEAST_MOVE = 5e-4
"""Of a step: what moves it by less is not worth a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Something that a step rests on, and that can be measured."""

    name: str
    kind: str
    """Field of `StepError` that says how well it is known."""
    means: Means
    fields: tuple[str, ...]
    """Inputs that say it; empty: it scales the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What measuring an unknown would bring."""

    unknown: Unknown
    error_fraction: float
    """Standard deviation of its logarithm, as it is known now."""
    measured_error_fraction: float
    """The same once it is measured."""
    moves_fraction: float
    """By how much of the step one standard deviation moves it."""
    gain: float
    """What measuring takes from the square of the step's error, in log time."""


def unknowns(case: Case) -> tuple[Unknown, ...]:
    """What a step on such a cluster rests on."""
    inner, *outer = case.cluster.levels
    fit = "cluster.device.fit."
    device = [
        ("rate of matmuls", "matmul_fraction", "matmul_fraction"),
        ("rate of attention", "attention_fraction", "attention_forward_fraction"),
        ("rate of element-wise kernels", "element_wise_fraction", "memory_fraction"),
        ("host time of a kernel", "launch_fraction", "kernel_launch_seconds"),
    ]
    links = [
        (f"bandwidth of {inner.name}", "inside_fraction", (inner.name,)),
        (
            f"bandwidth of {' and '.join(level.name for level in outer)}",
            "across_fraction",
            tuple(level.name for level in outer),
        ),
    ]
    return (
        Unknown(name="your software and machines", kind="stack_fraction", means="run", fields=()),
        Unknown(name="any step on the device", kind="base_fraction", means="calibrate", fields=()),
        *(
            Unknown(name=name, kind=kind, means="calibrate", fields=(fit + field,))
            for name, kind, field in device
        ),
        *(
            Unknown(
                name=name,
                kind=kind,
                means=_means_of(case, levels[-1]),
                fields=tuple(
                    f"cluster.levels.{level}.port_bandwidth_bytes_per_second" for level in levels
                ),
            )
            for name, kind, levels in links
            if levels
        ),
    )


def _means_of(case: Case, level_name: str) -> Means:
    (level,) = (one for one in case.cluster.levels if one.name == level_name)
    return "calibrate between nodes" if case.cluster.joins_nodes(level) else "calibrate"


def measurements(
    case: Case, *, measured: StepError, told_stack: bool = False
) -> tuple[Measurement, ...]:
    """What deserves a measurement, the worthiest first; `measured`: how far steps are off on
    measured devices; `told_stack`: runs of the stack are known already."""
    seconds = estimate(case).time.total_seconds
    found = [
        _measurement(case, unknown, measured, seconds)
        for unknown in unknowns(case)
        if not (told_stack and unknown.means == "run")
    ]
    worth = [one for one in found if one.moves_fraction >= LEAST_MOVE]
    return tuple(sorted(worth, key=lambda one: -one.gain))


def calibrated_log_error(case: Case, *, step: Interval, measured: StepError) -> float:
    """Standard deviation of the log of `step`, the prediction of the case, once its device is
    calibrated: less what calibrating takes from its square."""
    now = log(step.upper / step.lower) / (2 * NORMAL_80)
    found = measurements(case, measured=measured)
    gain = sum(one.gain for one in found if one.unknown.means == "calibrate")
    return sqrt(max(0.0, now**2 - gain))


def _measurement(case: Case, unknown: Unknown, measured: StepError, seconds: float) -> Measurement:
    now: float = getattr(_error(case), unknown.kind)
    least = 0.0 if unknown.means == "run" else getattr(measured, unknown.kind)
    then = min(now, least)
    moves, left = (_moves(case, unknown, one, seconds) for one in (now, then))
    return Measurement(
        unknown=unknown,
        error_fraction=now,
        measured_error_fraction=then,
        moves_fraction=moves,
        gain=moves**2 - left**2,
    )


def _error(case: Case) -> StepError:
    return error_of(case.cluster, case.training.family)


def _moves(case: Case, unknown: Unknown, error: float, seconds: float) -> float:
    if not unknown.fields:
        return error
    sides = (_step_seconds(case, unknown, exp(error)), _step_seconds(case, unknown, exp(-error)))
    return sum(abs(log(side / seconds)) for side in sides) / 2


def _step_seconds(case: Case, unknown: Unknown, factor: float) -> float:
    """The step with the unknown so many times as large; a share no larger than 1."""
    values = dict(rates_and_constants(case))
    for field in unknown.fields:
        number = values.get(field, 0.0) * factor
        try:
            case = with_value(case, field, number)
        except SpecError:
            case = with_value(case, field, 1.0)
    return estimate(case).time.total_seconds


def band_fraction(case: Case, measured: Iterable[Measurement] = ()) -> float:
    """80 % half-width of the predicted step once all of `measured` are."""
    known = {one.unknown.kind: one.measured_error_fraction for one in measured}
    error = replace(_error(case), **known)
    return exp(NORMAL_80 * log_error(estimate(case).time, error)) - 1
