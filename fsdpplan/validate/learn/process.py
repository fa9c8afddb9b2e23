"""Process: what measured jobs say of others, as a Student-t process over log(measured / predicted).

Jobs are jointly normal under `likeness`, with a variance that is itself not known: a stack may be a
wild one, and its own runs tell (Shah, Wilson and Ghahramani 2014, *Student-t Processes as
Alternatives to Gaussian Processes*). One job in many is far off for a reason of its own: its own
variance is made larger by the weights of a Student t, found by EM (Lange, Little and Taylor 1989,
*Robust Statistical Modeling Using the t Distribution*), so that it hardly pulls at others, while of
that very job it still tells.

How many times as long as predicted a program's host takes is one more unknown, and what it does to
a step is no sum of parts: a pass takes the longer of what host and device need. So there is a
process for each of `HOST_LOGS`, over what that host leaves unexplained, weighed by how likely it
makes what was measured: the unknown is integrated out on a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log1p, sqrt
from typing import TYPE_CHECKING

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.spec.ledger import Widths
from fsdpplan.validate.learn.features import Features
from fsdpplan.validate.learn.likeness import Jobs, host_chances, jobs_of, likeness, own_likeness

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
NO_CHANCE_LOG = 25.0
"""A state that is less likely than another by e to the power of this has no chance."""


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
class State:
    """The posterior, were the host of the known jobs' program known."""

    odd: Numbers
    """Variance of each known job for a reason of its own, beyond that which any job has."""
    inverse: Numbers
    """Of the covariance of what was measured."""
    pull: Numbers
    """`inverse` times what was measured, less what the host explains."""
    width: float
    """Deviation of a normal as wide as this t, over the root of the prior's variance."""
    weights: Numbers
    """Of the known jobs: the less, the odder one is."""
    evidence: float
    """Log density of what was measured, up to what all states share."""

    def judged(self, shared: Numbers, variance: float, place: int | None) -> tuple[float, float]:
        """(mean, variance) of what has that covariance with the known jobs and that variance before
        them; where it is the one at `place`, it is odd as that one is."""
        if place is not None:
            shared = shared.copy()
            shared[place] += self.odd[place]
            variance += float(self.odd[place])
        left = variance - float(shared @ self.inverse @ shared)
        return float(shared @ self.pull), max(LEAST_VARIANCE, left) * self.width**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The posterior, given some jobs."""

    widths: Widths
    known: Jobs
    places: dict[int, int]
    """Where each known job stands among them."""
    states: tuple[State, ...]
    state_of: tuple[int, ...]
    """Place of the state of each of `HOST_LOGS`: those that explain the same of the known jobs have
    one."""
    chances: Numbers
    """Of each of `HOST_LOGS`, by what was measured."""
    middle: float
    """Place of their median among `HOST_LOGS`: steps are expected with that host. Their mean would
    make all that is near to waiting slow for a few hosts that are slower by far."""
    memory: dict[Features, tuple[Numbers, float]] = field(default_factory=dict)
    """What was asked before: covariance with the known jobs, and variance before them."""

    def judged(self, features: Sequence[Features]) -> Judged:
        """Of one new run of each of these jobs."""
        import numpy as np

        jobs = jobs_of(features)
        shared, before = likeness(jobs, self.known, self.widths), own_likeness(jobs, self.widths)
        found = [self._judged(*one) for one in zip(features, shared, before, strict=True)]
        mean, variance = (np.array(column) for column in zip(*found, strict=True))
        return Judged(mean=mean, deviation=np.sqrt(variance))

    def one(self, features: Features) -> tuple[float, float]:
        """(mean, deviation) of one job."""
        mean, variance = self._judged(features, *self._remembered(features))
        return mean, sqrt(variance)

    def difference_deviation(self, one: Features, other: Features) -> float:
        """Deviation of the difference of two jobs: what they share cancels."""
        import numpy as np

        if one.job == other.job:
            return 0.0
        a, before_a = self._remembered(one)
        b, before_b = self._remembered(other)
        both = float(likeness(jobs_of([one]), jobs_of([other]), self.widths)[0, 0])
        means, variances = [], []
        for state in self.states:
            apart, before = a - b, before_a + before_b - 2 * both
            for job, sign in ((one.job, 1), (other.job, -1)):
                if job in self.places:
                    place = self.places[job]
                    apart[place] += sign * state.odd[place]
                    before += float(state.odd[place])
            mean, variance = state.judged(apart, before, None)
            means.append(mean)
            variances.append(variance)
        delays = np.subtract(one.delays, other.delays)
        return sqrt(self._over_hosts(means, variances, delays, is_own=self._is_own(one))[1])

    def correlations(self, features: Features) -> Numbers:
        """Of a job with each known one, before anything is measured; its own part left out."""
        import numpy as np

        shared = likeness(jobs_of([features]), self.known, self.widths)[0]
        (before,) = own_likeness(jobs_of([features]), self.widths)
        found: Numbers = shared / np.sqrt(before * own_likeness(self.known, self.widths))
        return found

    def _judged(self, one: Features, shared: Numbers, before: float) -> tuple[float, float]:
        """(mean, variance) of a new run of a job with that covariance and variance."""
        import numpy as np

        variance, place = before + self.widths.run**2, self.places.get(one.job)
        found = [state.judged(shared, variance, place) for state in self.states]
        means, variances = zip(*found, strict=True)
        return self._over_hosts(means, variances, np.array(one.delays), is_own=self._is_own(one))

    def _over_hosts(
        self, means: Sequence[float], variances: Sequence[float], delays: Numbers, *, is_own: bool
    ) -> tuple[float, float]:
        """(mean, variance) of what has these in each state, and takes so much longer with each
        host; of another program's nothing is known: it is as predicted, give or take."""
        import numpy as np

        at = list(self.state_of)
        each, spread, beside = np.array(means)[at], np.array(variances)[at], 0.0
        if is_own:
            each = each + delays
        else:
            chances = host_chances(self.widths)
            beside = float(chances @ delays**2 - (chances @ delays) ** 2)
        mean = float(np.interp(self.middle, range(len(each)), each))
        return mean, float(self.chances @ (spread + (each - mean) ** 2)) + beside

    def _is_own(self, features: Features) -> bool:
        return features.stack.is_program_of(self.known.features[0].stack)

    def _remembered(self, features: Features) -> tuple[Numbers, float]:
        if features not in self.memory:
            jobs = jobs_of([features])
            shared = likeness(jobs, self.known, self.widths)[0]
            self.memory[features] = shared, float(own_likeness(jobs, self.widths)[0])
        return self.memory[features]


def process(known: Sequence[KnownJob], widths: Widths) -> Process:
    """The posterior, given `known`: at least one, no job twice.

    The host is that of the first one's program; of another program's it tells nothing, nor the
    other way round.
    """
    import numpy as np

    jobs = jobs_of([one.features for one in known])
    first = known[0].features.stack
    is_own = np.array([[one.features.stack.is_program_of(first)] for one in known])
    explained, of = np.unique(jobs.delays * is_own, axis=1, return_inverse=True)
    left_over = np.array([one.log_ratio for one in known]) - explained.T
    runs = np.array([float(one.runs) for one in known])
    states = _likely_states(likeness(jobs, jobs, widths), left_over, runs, widths)
    kept = {state: place for place, state in enumerate(states)}
    by_host = of.ravel().tolist()
    evidence = np.array([states[one].evidence if one in states else -np.inf for one in by_host])
    chances = host_chances(widths) * np.exp(evidence - evidence.max())
    chances /= chances.sum()
    return Process(
        widths=widths,
        known=jobs,
        places={job.job: place for place, job in enumerate(jobs.features)},
        states=tuple(states.values()),
        state_of=tuple(kept.get(one, 0) for one in by_host),
        chances=chances,
        middle=float(np.interp(0.5, np.cumsum(chances) - chances / 2, range(len(chances)))),
    )


def _likely_states(
    prior: Numbers, left_over: Numbers, runs: Numbers, widths: Widths
) -> dict[int, State]:
    """The states that may be, by their place among what each of them leaves over.

    Left out is what has no chance beside the one that is likeliest while no job is odd, with that
    one's odd jobs: it would cost as much again.
    """
    import numpy as np

    inverse = np.linalg.inv(prior + np.diag(widths.job**2 + widths.run**2 / runs))
    first = int((left_over @ inverse * left_over).sum(1).argmin())
    best = _state(prior, left_over[first], runs, widths)
    size = (left_over @ best.inverse * left_over).sum(1)
    start = widths.degrees_of_freedom - 2
    behind = np.log1p(size / start) - log1p(size[first] / start)
    near = np.flatnonzero((start + 2 + len(runs)) / 2 * behind < NO_CHANCE_LOG)
    return {
        int(place): best
        if place == first
        else _state(prior, left_over[place], runs, widths, weights=best.weights)
        for place in near
    }


def _state(
    prior: Numbers,
    left_over: Numbers,
    runs: Numbers,
    widths: Widths,
    *,
    weights: Numbers | None = None,
) -> State:
    """The posterior of jobs with that covariance, of so many runs each; `weights` where it is
    thought to be near."""
    import numpy as np

    noise = widths.run**2 / runs
    own = widths.job**2 + noise
    weights = np.ones(len(runs)) if weights is None else weights
    for _ in range(MOST_ROUNDS):
        wider = noise + own * (1 / weights - 1)
        inverse: Numbers = np.linalg.inv(prior + np.diag(wider)).astype(float)
        pull = inverse @ left_over
        far = (own / weights * pull) ** 2 / own
        found = np.minimum(1.0, (OUTLIER_DEGREES + 1) / (OUTLIER_DEGREES + far))
        if np.abs(found - weights).max() < STILL:
            break
        weights = found
    start, size = widths.degrees_of_freedom - 2, float(left_over @ pull)
    degrees = start + 2 + len(runs)
    # by how much this stack's variance differs from the prior's
    scale = (start + size) / (start + len(runs))
    return State(
        odd=own * (1 / weights - 1) / (1 + ODD_JOBS**-runs),
        inverse=inverse,
        pull=pull,
        width=sqrt(scale * (degrees - 2) / degrees) * student_80(degrees) / NORMAL_80,
        weights=weights,
        # the density of a Student t, in the covariance that odd jobs leave
        evidence=float(np.linalg.slogdet(inverse)[1]) / 2 - degrees / 2 * log1p(size / start),
    )


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
