"""Learned search: the factors at which the cost model says what finished jobs took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, log, sqrt

from fsdpplan.cost.band import NORMAL_80, kind_errors, stack_log_error
from fsdpplan.cost.step_time import step_time
from fsdpplan.spec.cluster import Cluster, StepError
from fsdpplan.spec.corrected import scaled_cluster
from fsdpplan.spec.correction import PARTS
from fsdpplan.spec.estimate import TimeBreakdown
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.validate.errors import BAND_FRACTION, percentile
from fsdpplan.validate.linear import solved
from fsdpplan.validate.robust import HUBER

BELIEF_JOBS = 2.0
"""Jobs that the belief on how far a job is off, whatever the factors, counts as."""
CAUTION = 2.0
"""Before runs say how far they scatter, one is taken to be off by so many times the profile's error
for reasons of its own: a single run hardly moves anything."""
MOST_STEPS = 8
LONGEST_STEP = 0.5
"""Of a logarithm, in one step."""
STILL = 2e-3
NUDGE = 0.04
"""Step of a logarithm for a derivative: wide, since what is hidden has none at its edge."""

Matrix = list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """One job, and what its runs took."""

    model: Model
    training: Training
    layout: Layout
    cluster: Cluster
    """Where it ran, with the profile's numbers."""
    step_seconds: float
    """Measured: the median of its runs."""
    runs: int

    @property
    def weight(self) -> float:
        """n runs of one job count as sqrt(n) jobs: they say less of other layouts."""
        return sqrt(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search; a point is (b, g of each part)."""

    jobs: Sequence[FinishedJob]
    error: StepError
    """The profile's."""
    least: dict[str, float]
    """Of each factor; below it no rate grows."""
    doubt: float
    """The profile's error of such steps."""

    @property
    def spreads(self) -> list[float]:
        """Of b, the stack's and every step's, and of each g; none is known beyond doubt."""
        errors = kind_errors(self.error)
        base = hypot(self.error.base_fraction, stack_log_error(self.error))
        return [max(1e-3, base), *(max(1e-3, errors[part]) for part in PARTS)]

    def factors(self, point: Sequence[float]) -> dict[str, float]:
        base, *own = point
        return {
            part: max(self.least[part], exp(base + one))
            for part, one in zip(PARTS, own, strict=True)
        }

    def times(self, point: Sequence[float]) -> list[TimeBreakdown]:
        return scaled_times(self.jobs, self.factors(point))

    def residuals(self, point: Sequence[float]) -> list[float]:
        """log(measured / predicted) of each job."""
        return [
            log(job.step_seconds / time.total_seconds)
            for job, time in zip(self.jobs, self.times(point), strict=True)
        ]

    def columns(self, point: Sequence[float], residuals: Sequence[float]) -> Matrix:
        """How much each job's log time grows with b and with each g."""
        own = []
        for index in range(1, len(point)):
            nudged = [one + NUDGE * (place == index) for place, one in enumerate(point)]
            after = self.residuals(nudged)
            own.append([(a - b) / NUDGE for a, b in zip(residuals, after, strict=True)])
        return [[sum(column) for column in zip(*own, strict=True)], *own]

    def found(self) -> list[float]:
        """The point where misfit and priors together are least."""
        point = [0.0] * (1 + len(PARTS))
        belief = CAUTION * self.doubt
        residuals = self.residuals(point)
        for _ in range(MOST_STEPS):
            scatter = scatter_of(residuals, belief)
            columns = self.columns(point, residuals)
            step = solved(*self.equations(point, residuals, columns, scatter))
            longest = max(map(abs, step))
            share = min(1.0, LONGEST_STEP / longest) if longest else 0.0
            before = self.loss(point, residuals, scatter)
            while share * longest > STILL:
                tried = [one + share * more for one, more in zip(point, step, strict=True)]
                after = self.residuals(tried)
                if self.loss(tried, after, scatter) < before:
                    point, residuals = tried, after
                    break
                share /= 3
            else:
                break
        return point

    def loss(self, point: Sequence[float], residuals: Sequence[float], scatter: float) -> float:
        limit = HUBER * scatter
        total = 0.0
        for job, size in zip(self.jobs, map(abs, residuals), strict=True):
            far = size > limit
            total += job.weight * (limit * (size - limit / 2) if far else size**2 / 2)
        priors = sum((one / spread) ** 2 for one, spread in zip(point, self.spreads, strict=True))
        return total / scatter**2 + priors / 2

    def equations(
        self,
        point: Sequence[float],
        residuals: Sequence[float],
        columns: Matrix,
        scatter: float,
    ) -> tuple[Matrix, list[float]]:
        """Normal matrix and right side of one step, over scatter squared."""
        weights = [
            job.weight * one / scatter**2
            for job, one in zip(self.jobs, huber_weights(residuals, scatter), strict=True)
        ]
        matrix = [
            [sum(w * a * b for w, a, b in zip(weights, x, y, strict=True)) for y in columns]
            for x in columns
        ]
        right = [
            sum(w * a * r for w, a, r in zip(weights, x, residuals, strict=True)) for x in columns
        ]
        for index, spread in enumerate(self.spreads):
            matrix[index][index] += 1 / spread**2
            right[index] -= point[index] / spread**2
        return matrix, right


def profile_times(jobs: Sequence[FinishedJob]) -> list[TimeBreakdown]:
    """What the profile's numbers predict."""
    return scaled_times(jobs, {})


def scaled_times(jobs: Sequence[FinishedJob], factors: Mapping[str, float]) -> list[TimeBreakdown]:
    """The steps of `jobs` where the parts take `factors` times as long as by the profile."""
    return [
        step_time(
            model=job.model,
            cluster=scaled_cluster(job.cluster, factors) if factors else job.cluster,
            training=job.training,
            layout=job.layout,
        ).time
        for job in jobs
    ]


def huber_weights(residuals: Sequence[float], scatter: float) -> list[float]:
    """1 for near jobs, less for far ones."""
    limit = HUBER * scatter
    return [1.0 if abs(one) <= limit else limit / abs(one) for one in residuals]


def scatter_of(residuals: Sequence[float], belief: float) -> float:
    """Standard deviation of jobs around their predictions, the belief counting as some of them.

    Of the normal distribution whose middle 80 % is as wide as that of the jobs: that is what the
    band promises, and one far job in ten does not widen it.
    """
    jobs = len(residuals)
    seen = percentile([abs(one) for one in residuals], BAND_FRACTION) / NORMAL_80
    return sqrt((BELIEF_JOBS * belief**2 + jobs * seen**2) / (BELIEF_JOBS + jobs))
