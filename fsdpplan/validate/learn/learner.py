"""Learner: what measured runs say of the layouts of one question.

    step = step by the cost model · exp(mean)

with the process's mean and, for the band, its deviation. The parts of the time stay the cost
model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.search.order import Entry
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Estimate, Interval, LearnedStep
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.learning import Widths
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.validate.learn.evidence import Told
from fsdpplan.validate.learn.features import Features, Stack, features_of
from fsdpplan.validate.learn.known import known_jobs
from fsdpplan.validate.learn.nearest import Nearest, nearest_of
from fsdpplan.validate.learn.process import KnownJob, Process, process


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The posterior, and the question that it is asked about."""

    process: Process
    known: tuple[KnownJob, ...]
    model: Model
    cluster: Cluster
    training: Training
    stack: Stack

    @property
    def runs(self) -> int:
        """All that were learned from."""
        return sum(job.runs for job in self.known)

    @property
    def softwares(self) -> tuple[str, ...]:
        """Those of the runs."""
        return tuple(dict.fromkeys(job.features.stack.software for job in self.known))

    def corrected(self, layout: Layout, estimate: Estimate) -> Estimate:
        """`estimate`, which is the cost model's, as the runs say."""
        features = self._features(layout, estimate)
        mean, deviation = self.process.one(features)
        return with_learned(
            estimate, mean=mean, deviation=deviation, nearest=self.nearest(features)
        )

    def nearest(self, features: Features) -> Nearest:
        """The run that tells most of such a job."""
        return nearest_of(self.known, self.process.correlations(features), features, self.model)

    def difference_fraction(self, one: Entry, other: Entry) -> float:
        """Error of the difference of two layouts, as a share of the step: the 80 % half-width of
        the ratio of their step times."""
        features = (self._features(*entry) for entry in (one, other))
        return exp(NORMAL_80 * self.process.difference_deviation(*features)) - 1

    def _features(self, layout: Layout, estimate: Estimate) -> Features:
        return features_of(
            model=self.model,
            training=self.training,
            layout=layout,
            gpus=self.cluster.gpus,
            time=estimate.time,
            stack=self.stack,
        )


def learner(
    runs: Sequence[Told],
    *,
    model: Model,
    cluster: Cluster,
    training: Training,
    software: str,
    widths: Widths,
) -> Learner | None:
    """What `runs` say of a question; None where none of them can be predicted."""
    stack = Stack.of(software=software, training=training, device=cluster.device.name)
    known = known_jobs(runs, stack, cluster)
    if not known:
        return None
    return Learner(
        process=process(known, widths),
        known=tuple(known),
        model=model,
        cluster=cluster,
        training=training,
        stack=stack,
    )


def with_learned(
    estimate: Estimate, *, mean: float, deviation: float, nearest: Nearest
) -> Estimate:
    """`estimate` with its step times exp(mean), its band from the deviation, its rates by both.

    No step is faster than its FLOPs at the device's peak.
    """
    factor = max(exp(mean), estimate.hfu_fraction, estimate.mfu_fraction)
    return replace(
        estimate,
        step_seconds=learned_interval(estimate.time.total_seconds, factor, deviation),
        tokens_per_second=estimate.tokens_per_second / factor,
        tokens_per_second_per_gpu=estimate.tokens_per_second_per_gpu / factor,
        mfu_fraction=estimate.mfu_fraction / factor,
        hfu_fraction=estimate.hfu_fraction / factor,
        learned=LearnedStep(
            runs=nearest.runs,
            factor=factor,
            without=estimate.step_seconds,
            nearest=nearest.words,
            far=nearest.far,
        ),
    )


def learned_interval(seconds: float, factor: float, deviation: float) -> Interval:
    """The step with its 80 % band, of one that takes `seconds` by the cost model."""
    expected, width = seconds * factor, exp(NORMAL_80 * deviation)
    return Interval(lower=expected / width, expected=expected, upper=expected * width)
