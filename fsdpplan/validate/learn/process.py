"""Process: what measured jobs say of others, as a Student-t process over log(measured / predicted).

Jobs are jointly normal under `likeness`, with a variance that is itself not known: a stack may be a
wild one, and its own runs tell (Shah, Wilson and Ghahramani 2014, *Student-t Processes as
Alternatives to Gaussian Processes*). One job in many is far off for a reason of its own: its own
variance is made larger by the weights of a Student t, found by EM (Lange, Little and Taylor 1989,
*Robust Statistical Modeling Using the t Distribution*), so that it hardly pulls at others, while of
that very job it still tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.spec.learning import Widths
from fsdpplan.validate.learn.features import Features
from fsdpplan.validate.learn.likeness import Jobs, jobs_of, likeness, own_likeness

if TYPE_CHECKING:
    from fsdpplan.validate.learn.likeness import Numbers

OUTLIER_DEGREES = 4.0
"""Degrees of freedom of one job's own part; stacks of the held-back rows have as many."""
ODD_JOBS = 5.0
"""Odds that a single run that is far off is of an odd job, and was not odd itself; each further run
of the job multiplies them. Oddness of a job has its causes in what no column says, and stays."""
MOST_ROUNDS = 20
STILL = 1e-2
"""Change of the weights below which they are found."""
LEAST_VARIANCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """One job that ran."""

    features: Features
    log_ratio: float
    """log(measured / predicted), of the median of its runs."""
    runs: int
    gpus: int
    model: str
    degrees: str
    """In words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """log(measured / predicted) of runs that are still to be made."""

    mean: Numbers
    deviation: Numbers
    """Standard deviation of the normal with as wide a middle 80 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The posterior, given some jobs."""

    widths: Widths
    known: Jobs
    odd: Numbers
    """Variance of each known job for a reason of its own, beyond that which any job has."""
    inverse: Numbers
    """Of the covariance of what was measured."""
    pull: Numbers
    """`inverse` times what was measured."""
    scale: float
    """By how much this stack's variance differs from the prior's."""
    memory: dict[Features, tuple[Numbers, float]] = field(default_factory=dict)
    """What was asked before: covariance with the known jobs, and variance before them."""

    @property
    def _width(self) -> float:
        """Deviation of a normal as wide as this t, over the root of the prior's variance."""
        degrees = self.widths.degrees_of_freedom + len(self.pull)
        return sqrt(self.scale * (degrees - 2) / degrees) * student_80(degrees) / NORMAL_80

    def judged(self, features: Sequence[Features]) -> Judged:
        """Of one new run of each of these jobs."""
        import numpy as np

        shared, before = self._prior(jobs_of(features))
        known = np.einsum("ij,jk,ik->i", shared, self.inverse, shared)
        variance = np.maximum(LEAST_VARIANCE, before + self.widths.run**2 - known)
        return Judged(mean=shared @ self.pull, deviation=np.sqrt(variance) * self._width)

    def one(self, features: Features) -> tuple[float, float]:
        """(mean, deviation) of one job."""
        shared, before = self._remembered(features)
        variance = before + self.widths.run**2 - float(shared @ self.inverse @ shared)
        return float(shared @ self.pull), sqrt(max(LEAST_VARIANCE, variance)) * self._width

    def difference_deviation(self, one: Features, other: Features) -> float:
        """Deviation of the difference of two jobs: what they share cancels."""
        if one.job == other.job:
            return 0.0
        a, before_a = self._remembered(one)
        b, before_b = self._remembered(other)
        both = float(likeness(jobs_of([one]), jobs_of([other]), self.widths)[0, 0])
        apart = a - b
        variance = before_a + before_b - 2 * both - float(apart @ self.inverse @ apart)
        return sqrt(max(0.0, variance)) * self._width

    def correlations(self, features: Features) -> Numbers:
        """Of a job with each known one, before anything is measured; its own part left out."""
        import numpy as np

        shared = likeness(jobs_of([features]), self.known, self.widths)[0]
        (before,) = own_likeness(jobs_of([features]), self.widths)
        found: Numbers = shared / np.sqrt(before * own_likeness(self.known, self.widths))
        return found

    def _remembered(self, features: Features) -> tuple[Numbers, float]:
        if features not in self.memory:
            shared, before = self._prior(jobs_of([features]))
            self.memory[features] = shared[0], float(before[0])
        return self.memory[features]

    def _prior(self, jobs: Jobs) -> tuple[Numbers, Numbers]:
        """(covariance with the known jobs, variance of each): of a known job that is far off for a
        reason of its own, with that reason."""
        shared = likeness(jobs, self.known, self.widths)
        before = own_likeness(jobs, self.widths)
        places = {job: place for place, job in enumerate(self.known.named("job"))}
        for row, job in enumerate(jobs.named("job")):
            if job in places:
                place = places[job]
                shared[row, place] += self.odd[place]
                before[row] += self.odd[place]
        return shared, before


def process(known: Sequence[KnownJob], widths: Widths) -> Process:
    """The posterior, given `known`: at least one, no job twice."""
    import numpy as np

    jobs = jobs_of([one.features for one in known])
    measured = np.array([one.log_ratio for one in known])
    runs = np.array([float(one.runs) for one in known])
    noise = widths.run**2 / runs
    prior = likeness(jobs, jobs, widths)
    own, weights = widths.job**2 + noise, np.ones(len(known))
    for _ in range(MOST_ROUNDS):
        wider = noise + own * (1 / weights - 1)
        inverse: Numbers = np.linalg.inv(prior + np.diag(wider)).astype(float)
        pull = inverse @ measured
        far = (own / weights * pull) ** 2 / own
        found = np.minimum(1.0, (OUTLIER_DEGREES + 1) / (OUTLIER_DEGREES + far))
        if np.abs(found - weights).max() < STILL:
            break
        weights = found
    start = widths.degrees_of_freedom - 2
    scale = (start + float(measured @ pull)) / (start + len(known))
    odd: Numbers = own * (1 / weights - 1) / (1 + ODD_JOBS**-runs)
    return Process(widths=widths, known=jobs, odd=odd, inverse=inverse, pull=pull, scale=scale)


def student_80(degrees: float) -> float:
    """Half-width of the middle 80 % of a Student t, to 0.1 % from 4 degrees of freedom on.

    Source: Abramowitz and Stegun 1964, 26.7.5 (the expansion around the normal).
    """
    z = NORMAL_80
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
