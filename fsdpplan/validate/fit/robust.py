"""Robust fits: a few positive numbers from measured times, a part of which is wrong.

Residuals are logarithms of predicted over measured time, so that a microsecond and a second count
alike. Far rows pull with a constant force instead of a growing one (Huber 1964, *Robust estimation
of a location parameter*), and steps are damped as Levenberg and Marquardt do. What the rows do not
tell stays at what was expected: each number is drawn to that as by one row of its own.

The descent is the project's own: SciPy's `least_squares` keeps the scale of Huber's loss fixed, and
is of the development environment alone, while `calibrate` runs where people train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log, sqrt
from statistics import median

HUBER = 1.345
"""Standard deviations past which a residual counts as far: 95 % as efficient as least squares where
all errors are normal."""
MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SCALE = 1e-3
"""Scatter of log time below which rows are taken to scatter so much: clocks are no better."""
TRIED_STARTS = 2
"""Of all starts, the best are followed to the end."""
MOST_STEPS = 40
STILL = 1e-4
"""A step of the logarithms that moves no number by more ends the search."""
NUDGE = 1e-4
"""Step of the logarithm for a derivative."""

Numbers = Mapping[str, float]
Predicted = Callable[[Numbers], Sequence[float]]
"""Times of all rows by the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """One number that is looked for."""

    expected: float
    """What it is without any row."""
    spread: float
    """How far from that it may well be, as a standard deviation of its logarithm."""
    lowest: float
    highest: float
    starts: tuple[float, ...] = ()
    """Where to begin besides `expected`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedNumber:
    """One number that was found."""

    value: float
    error_fraction: float
    """Standard error of its logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustFit:
    """What a fit came to."""

    numbers: Mapping[str, FittedNumber]
    residual_fraction: float
    """Root mean square of the log residuals, far ones counted with less weight."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    predicted: Predicted
    measured: Sequence[float]
    weights: Sequence[float]
    sought: Mapping[str, Sought]

    def residuals(self, point: Sequence[float]) -> list[float]:
        """log(predicted / measured) of each row at these logarithms."""
        numbers = {name: exp(one) for name, one in zip(self.sought, point, strict=True)}
        return [
            log(predicted / measured)
            for predicted, measured in zip(self.predicted(numbers), self.measured, strict=True)
        ]

    def priors(self, point: Sequence[float]) -> list[float]:
        """How far each number is from what was expected, in spreads."""
        return [
            (one - log(sought.expected)) / sought.spread
            for one, sought in zip(point, self.sought.values(), strict=True)
        ]

    def within(self, point: Sequence[float]) -> list[float]:
        """`point` moved into its limits."""
        return [
            min(log(sought.highest), max(log(sought.lowest), one))
            for one, sought in zip(point, self.sought.values(), strict=True)
        ]


def robust_fit(
    predicted: Predicted,
    measured: Sequence[float],
    sought: Mapping[str, Sought],
    *,
    weights: Sequence[float] | None = None,
) -> RobustFit:
    """The numbers whose predictions are nearest to the measured times, of which there is at least
    one.

    `weights` are how many rows each row counts for; None: one. No chance is involved.
    """
    assert measured
    problem = _Problem(
        predicted=predicted,
        measured=measured,
        weights=[1.0] * len(measured) if weights is None else weights,
        sought=sought,
    )
    starts = product(*((one.expected, *one.starts) for one in sought.values()))
    points = [problem.within([log(one) for one in start]) for start in starts]
    points.sort(key=lambda point: _size(problem, point))
    found = [_descend(problem, point) for point in points[:TRIED_STARTS]]
    return _described(problem, min(found, key=lambda point: _size(problem, point)))


def robust_scale(residuals: Sequence[float]) -> float:
    """Standard deviation of `residuals`, of which less than half may be wrong."""
    middle = median(residuals)
    return max(LEAST_SCALE, MAD * median(abs(one - middle) for one in residuals))


def _size(problem: _Problem, point: Sequence[float]) -> float:
    """Mean size of the residuals, by which starts and ends are compared."""
    sizes = map(abs, problem.residuals(point))
    total = sum(weight * size for weight, size in zip(problem.weights, sizes, strict=True))
    return total / sum(problem.weights)


def _huber_weights(problem: _Problem, residuals: Sequence[float], scale: float) -> list[float]:
    limit = HUBER * scale
    return [
        weight * (1.0 if abs(one) <= limit else limit / abs(one))
        for weight, one in zip(problem.weights, residuals, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How far residuals scatter at one point."""

    away: float
    """Around 0: past a multiple of this they are far."""
    around: float
    """Around their middle: as one row of so much scatter counts what was expected. At the start of
    a search all rows are far off alike, which says nothing of how good they are."""


def _scale(residuals: Sequence[float]) -> _Scale:
    away = max(LEAST_SCALE, MAD * median(map(abs, residuals)))
    return _Scale(away=away, around=min(away, robust_scale(residuals)))


def _loss(problem: _Problem, point: Sequence[float], scale: _Scale) -> float:
    """What a step must make less: Huber's loss of all rows, and the priors."""
    limit = HUBER * scale.away
    total = sum((scale.around * one) ** 2 for one in problem.priors(point)) / 2
    for weight, one in zip(problem.weights, problem.residuals(point), strict=True):
        size = abs(one)
        total += weight * (size**2 / 2 if size <= limit else limit * (size - limit / 2))
    return total


def _descend(problem: _Problem, start: Sequence[float]) -> list[float]:
    """Damped steps from `start` until none helps; the scale is found anew before each."""
    point, damping = list(start), 1e-3
    for _ in range(MOST_STEPS):
        residuals = problem.residuals(point)
        scale = _scale(residuals)
        normal, slope = _equations(problem, point, residuals, scale)
        before = _loss(problem, point, scale)
        moved = 0.0
        while damping < 1e6:
            tried = problem.within(_stepped(point, normal, slope, damping))
            if _loss(problem, tried, scale) < before:
                moved = max(abs(a - b) for a, b in zip(tried, point, strict=True))
                point, damping = tried, damping / 10
                break
            damping *= 10
        if moved < STILL:
            break
    return point


def _stepped(
    point: Sequence[float], normal: list[list[float]], slope: list[float], damping: float
) -> list[float]:
    import numpy as np

    damped = [
        [value * (1 + damping) if row == column else value for column, value in enumerate(values)]
        for row, values in enumerate(normal)
    ]
    step = np.linalg.solve(damped, [-one for one in slope]).tolist()
    return [one + max(-2.0, min(2.0, by)) for one, by in zip(point, step, strict=True)]


def _equations(
    problem: _Problem, point: Sequence[float], residuals: Sequence[float], scale: _Scale
) -> tuple[list[list[float]], list[float]]:
    """Normal matrix and slope of the loss, priors included."""
    weights = _huber_weights(problem, residuals, scale.away)
    columns = _derivatives(problem, point, residuals)
    normal = _products(columns, weights)
    slope = [
        sum(w * a * r for w, a, r in zip(weights, one, residuals, strict=True)) for one in columns
    ]
    pulls = zip(problem.priors(point), problem.sought.values(), strict=True)
    for index, (away, sought) in enumerate(pulls):
        normal[index][index] += (scale.around / sought.spread) ** 2
        slope[index] += scale.around**2 * away / sought.spread
    return normal, slope


def _derivatives(
    problem: _Problem, point: Sequence[float], residuals: Sequence[float]
) -> list[list[float]]:
    """Of all residuals by each logarithm."""
    columns = []
    for index, sought in enumerate(problem.sought.values()):
        nudge = -NUDGE if point[index] + NUDGE > log(sought.highest) else NUDGE
        nudged = [one + (nudge if place == index else 0.0) for place, one in enumerate(point)]
        after = problem.residuals(nudged)
        columns.append([(b - a) / nudge for a, b in zip(residuals, after, strict=True)])
    return columns


def _products(columns: Sequence[Sequence[float]], weights: Sequence[float]) -> list[list[float]]:
    return [
        [sum(w * a * b for w, a, b in zip(weights, one, other, strict=True)) for other in columns]
        for one in columns
    ]


def _described(problem: _Problem, point: Sequence[float]) -> RobustFit:
    residuals = problem.residuals(point)
    weights = _huber_weights(problem, residuals, _scale(residuals).away)
    squares = sum(w * r**2 for w, r in zip(weights, residuals, strict=True))
    rms = max(LEAST_SCALE, sqrt(squares / sum(weights)))
    errors = _standard_errors(problem, point, residuals, rms)
    return RobustFit(
        numbers={
            name: FittedNumber(value=exp(one), error_fraction=error)
            for name, one, error in zip(problem.sought, point, errors, strict=True)
        },
        residual_fraction=rms,
        rows=len(residuals),
    )


def _standard_errors(
    problem: _Problem, point: Sequence[float], residuals: Sequence[float], rms: float
) -> list[float]:
    """Of the logarithms, each row's error being `rms` whatever its weight.

        A^-1 B A^-1,  A = J' W J + s^2 / spread^2,  B = s^2 J' W^2 J + s^4 / spread^2

    A weight is what a row counts for, not how well it is known. Numbers that were bent to few rows
    leave less scatter than there is: s is larger than `rms` by that.
    """
    import numpy as np

    scatter = rms / sqrt(max(0.25, 1 - len(point) / len(residuals)))
    weights = _huber_weights(problem, residuals, scatter)
    columns = _derivatives(problem, point, residuals)
    bread = _products(columns, weights)
    filling = _products(columns, [(scatter * weight) ** 2 for weight in weights])
    for index, sought in enumerate(problem.sought.values()):
        bread[index][index] += (scatter / sought.spread) ** 2
        filling[index][index] += (scatter**2 / sought.spread) ** 2
    variances = [
        sum(a * filling[i][j] * b for i, a in enumerate(row) for j, b in enumerate(row))
        for row in np.linalg.inv(bread).tolist()
    ]
    return [sqrt(max(0.0, variance)) for variance in variances]
