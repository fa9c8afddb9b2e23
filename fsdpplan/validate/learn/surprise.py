"""Surprise: how unlikely the rows of a stack are after a few of them, and how that changes with the
widths.

A row that is predicted after k others of its stack has the density of a Student t with nu + k
degrees of freedom (Shah, Wilson and Ghahramani 2014, *Student-t Processes as Alternatives to
Gaussian Processes*, lemma 3):

    -log p(y) = log(pi v c) / 2 + (nu + k + 1)/2 log(1 + e^2/(v c)) + log Gamma((nu + k)/2)
                - log Gamma((nu + k + 1)/2)
    m = K_ta A y_a    v = k_t - K_ta A K_at    c = nu - 2 + y_a' A y_a    A = K_aa^-1    e = y - m
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import lgamma, log, pi
from typing import TYPE_CHECKING

from fsdpplan.spec.learning import Widths
from fsdpplan.validate.learn.features import Features
from fsdpplan.validate.learn.likeness import Jobs, jobs_of, likeness, slopes

if TYPE_CHECKING:
    from fsdpplan.validate.learn.likeness import Numbers

LEAST_VARIANCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Rows of one stack, and which of them are known in each draw."""

    jobs: Jobs
    measured: Numbers
    """log(measured / predicted)."""
    orders: tuple[tuple[int, ...], ...]
    """Of each draw: the first k rows are known, the others predicted."""
    after: tuple[int, ...]
    """Each k."""


def drawn(
    rows: Sequence[tuple[Features, float]], *, draws: int, after: Sequence[int], least_tests: int
) -> Drawn:
    """`draws` of rows of (features, log of measured over predicted); a k that leaves fewer than
    `least_tests` to predict is left out."""
    import numpy as np

    return Drawn(
        jobs=jobs_of([features for features, _ in rows]),
        measured=np.array([ratio for _, ratio in rows]),
        orders=tuple(shuffled(len(rows), draw) for draw in range(draws)),
        after=tuple(k for k in after if len(rows) >= k + least_tests),
    )


def shuffled(rows: int, seed: int) -> tuple[int, ...]:
    """Places of rows in an order that is the same everywhere and has nothing to do with them."""
    return tuple(sorted(range(rows), key=lambda n: sha256(f"{seed} {n}".encode()).digest()))


def surprise(stack: Drawn, widths: Widths) -> tuple[float, Mapping[str, float]]:
    """(Minus the log density of a predicted row, as a mean over rows and draws, then a sum over k;
    its derivatives by the logarithm of each width, and by the degrees of freedom themselves)."""
    import numpy as np

    covariance = likeness(stack.jobs, stack.jobs, widths)
    noise, degrees = widths.run**2, widths.degrees_of_freedom
    slope, total, by_degrees = np.zeros_like(covariance), 0.0, 0.0
    for known in stack.after:
        for order in stack.orders:
            a, t = np.array(order[:known]), np.array(order[known:])
            share = 1 / (len(t) * len(stack.orders))
            inverse = np.linalg.inv(covariance[np.ix_(a, a)] + noise * np.eye(known))
            pull, cross = inverse @ stack.measured[a], covariance[np.ix_(t, a)]
            weights = cross @ inverse
            left = stack.measured[t] - cross @ pull
            spread = np.maximum(LEAST_VARIANCE, covariance[t, t] + noise - (weights * cross).sum(1))
            scale = degrees - 2 + float(stack.measured[a] @ pull)
            half, size = (degrees + known + 1) / 2, spread * scale
            far = left**2 / size
            gamma = lgamma(half - 0.5) - lgamma(half)
            total += gamma + log(pi) / 2 + float((np.log(size) / 2 + half * np.log1p(far)).mean())
            # by the mean, by the variance and by the scale
            tail = half / (1 + far)
            mean = -share * 2 * tail * left / size
            variance = share * (0.5 - tail * far) / spread
            wide = share * float((0.5 - tail * far).sum()) / scale
            np.add.at(slope, (t, t), variance)
            crossed = np.outer(mean, pull) - 2 * variance[:, None] * weights
            np.add.at(slope, (t[:, None], a[None]), crossed)
            among = (weights * variance[:, None]).T @ weights - np.outer(weights.T @ mean, pull)
            np.add.at(slope, (a[:, None], a[None]), among - wide * np.outer(pull, pull))
            by_degrees += (
                wide
                + share * float(np.log1p(far).sum()) / 2
                + _gamma_slope(half) * (len(t) * share)
            )
    draws = len(stack.orders)
    found = {name: float((slope * by).sum()) for name, by in slopes(stack.jobs, widths).items()}
    return total / draws, {**found, "degrees_of_freedom": by_degrees}


def _gamma_slope(half: float) -> float:
    """Derivative of log Gamma(h - 1/2) - log Gamma(h) by twice h."""
    step = 1e-5
    above, below = half + step, half - step
    rise = lgamma(above - 0.5) - lgamma(above) - lgamma(below - 0.5) + lgamma(below)
    return rise / (4 * step)
