"""Surprise: how unlikely the rows of a stack are after a few of them, and how that changes with the
widths.

A row that is predicted after k others of its stack has the density of a Student t with nu + k
degrees of freedom (Shah, Wilson and Ghahramani 2014, *Student-t Processes as Alternatives to
Gaussian Processes*, lemma 3), were the factor h of its host known:

    -log p(y | h) = log(pi v c) / 2 + (nu + k + 1)/2 log(1 + e^2/(v c)) + log Gamma((nu + k)/2)
                    - log Gamma((nu + k + 1)/2)
    m = K_ta A z_a    v = k_t - K_ta A K_at    c = nu - 2 + z_a' A z_a    A = K_aa^-1
    z = y - delay(h)    e = z_t - m

and over what h may be, each with the chance that the k rows leave it:

    p(y) = sum_h w_h p(y | h)    w_h ~ chance_h (1 + z_a' A z_a / (nu - 2))^-((nu + k)/2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import lgamma, log, pi
from typing import TYPE_CHECKING

from fsdpplan.spec.ledger import Widths
from fsdpplan.validate.learn.features import Features
from fsdpplan.validate.learn.likeness import (
    Jobs,
    host_chances,
    host_slopes,
    jobs_of,
    likeness,
    slopes,
)

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
    # hosts that explain the same are one
    explained, of = np.unique(stack.jobs.delays, axis=1, return_inverse=True)
    left_over = stack.measured[None] - explained.T
    in_state = np.eye(len(left_over))[of.ravel()].T
    each = host_chances(widths)
    chances = in_state @ each
    slope, total, by_degrees = np.zeros_like(covariance), 0.0, 0.0
    by_chance = np.zeros(len(chances))
    for known in stack.after:
        for order in stack.orders:
            a, t = np.array(order[:known]), np.array(order[known:])
            share = 1 / (len(t) * len(stack.orders))
            inverse = np.linalg.inv(covariance[np.ix_(a, a)] + noise * np.eye(known))
            cross = covariance[np.ix_(t, a)]
            weights = cross @ inverse
            pull = left_over[:, a] @ inverse  # a row a state, as all that follow but `spread`
            left = left_over[:, t] - pull @ cross.T
            spread = np.maximum(LEAST_VARIANCE, covariance[t, t] + noise - (weights * cross).sum(1))
            far_known = (left_over[:, a] * pull).sum(1)
            scale = degrees - 2 + far_known
            half, size = (degrees + known + 1) / 2, spread * scale[:, None]
            far = left**2 / size
            gamma = lgamma(half - 0.5) - lgamma(half)
            density = -(gamma + log(pi) / 2 + np.log(size) / 2 + half * np.log1p(far))
            evidence = np.log(chances) - (half - 0.5) * np.log1p(far_known / (degrees - 2))
            before = np.exp(evidence - evidence.max())
            before /= before.sum()
            highest = density.max(0)
            mixed = before[:, None] * np.exp(density - highest)
            total -= float((np.log(mixed.sum(0)) + highest).mean())
            after = share * mixed / mixed.sum(0)
            gained = after.sum(1) - share * len(t) * before
            by_chance -= gained
            # by the mean, by the variance and by the scale
            tail = half / (1 + far)
            mean = -after * 2 * tail * left / size
            variance = (after * (0.5 - tail * far)).sum(0) / spread
            wide = (after * (0.5 - tail * far)).sum(1) / scale
            np.add.at(slope, (t, t), variance)
            np.add.at(slope, (t[:, None], a[None]), mean.T @ pull - 2 * variance[:, None] * weights)
            likelier = gained * (half - 0.5) / scale
            among = (weights * variance[:, None]).T @ weights - (mean @ weights).T @ pull
            among -= (pull * (wide + likelier)[:, None]).T @ pull
            np.add.at(slope, (a[:, None], a[None]), among)
            by_degrees += (
                float(wide.sum())
                + float((after * np.log1p(far)).sum()) / 2
                + _gamma_slope(half) * (len(t) * share)
                + float(gained @ np.log1p(far_known / (degrees - 2))) / 2
                - float(likelier @ far_known) / (degrees - 2)
            )
    draws = len(stack.orders)
    found = {name: float((slope * by).sum()) for name, by in slopes(stack.jobs, widths).items()}
    for name, by_host in host_slopes(widths).items():
        found[name] = float(by_chance @ (in_state @ (each * by_host) / chances))
    return total / draws, {**found, "degrees_of_freedom": by_degrees}


def _gamma_slope(half: float) -> float:
    """Derivative of log Gamma(h - 1/2) - log Gamma(h) by twice h."""
    step = 1e-5
    above, below = half + step, half - step
    rise = lgamma(above - 0.5) - lgamma(above) - lgamma(below - 0.5) + lgamma(below)
    return rise / (4 * step)
