"""Learned: what finished runs on a cluster say of its profile, as factors on parts of a step.

The logarithm of a part's factor is that of all parts, b, and one of its own, g:

    log factor_k = b + g_k,  b ~ N(0, base^2),  g_k ~ N(0, error_k^2)

with the profile's errors of step times as spreads, so that without runs nothing changes and a part
that the profile knows well moves least. n runs of one job count as sqrt(n), by their median, since
they tell little of other layouts. The factors are where

    sum over jobs sqrt(n) huber(log measured - log predicted(factors)) / scatter^2 + priors

is least, found by Gauss-Newton steps on predictions of the cost model itself: what a slower network
adds to a step depends on what it hides behind. Far jobs pull with a constant force (Huber 1964,
*Robust estimation of a location parameter*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from statistics import median

from fsdpplan.cost.band import NORMAL_80, log_error
from fsdpplan.spec.cluster import Cluster, StepError
from fsdpplan.spec.corrected import least_factors
from fsdpplan.spec.correction import PARTS, Correction
from fsdpplan.validate.learned_error import corrected_error
from fsdpplan.validate.learned_search import FinishedJob, Search, profile_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a cluster is corrected by."""

    correction: Correction
    error: StepError
    """How far corrected step times are off."""


def learned(jobs: Sequence[FinishedJob], cluster: Cluster) -> Learned | None:
    """What `jobs` say of `cluster`'s numbers; None where there are no jobs."""
    if not jobs:
        return None
    ordered = sorted(jobs, key=lambda job: (job.step_seconds, job.runs))
    before = profile_times(ordered)
    search = Search(
        jobs=ordered,
        error=cluster.device.error,
        least=_least(ordered, cluster),
        doubt=median(log_error(time, cluster.device.error) for time in before),
    )
    point = search.found()
    times = search.times(point)
    error = corrected_error(search, point, times)
    ratios = [a.total_seconds / b.total_seconds for a, b in zip(times, before, strict=True)]
    widths = [exp(NORMAL_80 * log_error(time, error)) - 1 for time in times]
    correction = Correction(
        **{f"{part}_factor": factor for part, factor in search.factors(point).items()},
        runs=sum(job.runs for job in jobs),
        jobs=len(jobs),
        step_factor=median(ratios),
        half_width_fraction=median(widths),
    )
    return Learned(correction=correction, error=error)


def _least(jobs: Sequence[FinishedJob], cluster: Cluster) -> dict[str, float]:
    bounds = [least_factors(one) for one in (cluster, *(job.cluster for job in jobs))]
    return {part: min(1.0, max(bound[part] for bound in bounds)) for part in PARTS}
