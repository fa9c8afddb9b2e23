"""Learned error: how far step times are still off once finished runs have corrected them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from fsdpplan.cost.band import kind_errors, knowing_stack, step_shares
from fsdpplan.spec.cluster import StepError
from fsdpplan.spec.correction import PARTS
from fsdpplan.spec.estimate import TimeBreakdown
from fsdpplan.validate.learned_search import BELIEF_JOBS, CAUTION, Matrix, Search, scatter_of
from fsdpplan.validate.linear import inverse


def corrected_error(
    search: Search, point: Sequence[float], times: Sequence[TimeBreakdown]
) -> StepError:
    """Errors of corrected step times: what the runs left of the profile's, and their scatter.

    The typical mix of parts is known best, and each part varies around it. `layout_fraction` is the
    error of a ratio of two step times; one has 1/sqrt(2) of it before runs say how they scatter.
    """
    residuals = search.residuals(point)
    scatter = scatter_of(residuals, search.error.layout_fraction / sqrt(2))
    cautious = scatter_of(residuals, CAUTION * search.doubt)
    matrix, _ = search.equations(point, residuals, search.columns(point, residuals), cautious)
    sums = _sums_covariance(inverse(matrix))
    shares = [[step_shares(time)[part] for part in PARTS] for time in times]
    mix = [sum(column) for column in zip(*shares, strict=True)]
    mix = [one / sum(mix) for one in mix]
    common = max(0.0, _quadratic(sums, mix))
    away = [
        max(0.0, _quadratic(sums, [(place == part) - one for place, one in enumerate(mix)]))
        for part in range(len(PARTS))
    ]
    share = _share_around(sums, common, away, shares)
    priors = kind_errors(search.error)
    own = {
        f"{part}_fraction": min(priors[part], sqrt(share * variance))
        for part, variance in zip(PARTS, away, strict=True)
    }
    base = min(3.0, sqrt(scatter**2 + common))
    # what the runs' own stack is off by is in `common` now: nothing of other stacks' spread is left
    return replace(knowing_stack(search.error), **own, base_fraction=base)


def _share_around(
    sums: Matrix, common: float, away: Sequence[float], shares: Sequence[Sequence[float]]
) -> float:
    """How much of the parts' variances a step keeps, since errors of parts make up for each other:
    that of the job that keeps most, all of it being the belief."""
    kept = [
        max(0.0, _quadratic(sums, job) - common)
        / max(1e-12, sum(one**2 * variance for one, variance in zip(job, away, strict=True)))
        for job in shares
    ]
    most = min(1.0, max(kept))
    return (BELIEF_JOBS + len(kept) * most) / (BELIEF_JOBS + len(kept))


def _quadratic(matrix: Matrix, vector: Sequence[float]) -> float:
    return sum(
        a * one * b
        for a, row in zip(vector, matrix, strict=True)
        for one, b in zip(row, vector, strict=True)
    )


def _sums_covariance(covariance: Matrix) -> Matrix:
    """Covariance of b + g_k over parts."""
    base = covariance[0]
    indices = range(1, len(covariance))
    return [[base[0] + base[i] + base[j] + covariance[i][j] for j in indices] for i in indices]
