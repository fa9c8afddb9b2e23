"""Learner: what measured runs say of the layouts of one question.

    step = step by the cost model · exp(mean)

with the process's mean and, for the band, its deviation. The parts of the time stay the cost
model's.

Nearest: which of the known runs tells most of a job, and how far even that one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.search.order import Entry
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.ledger import Widths
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Estimate, Interval, LearnedStep
from fsdpplan.spec.training import Training
from fsdpplan.validate.learn.evidence import Told
from fsdpplan.validate.learn.features import Features, Stack, features_of
from fsdpplan.validate.learn.known import known_jobs
from fsdpplan.validate.learn.process import KnownJob, Process, process

if TYPE_CHECKING:
    from fsdpplan.validate.learn.likeness import Numbers


LEAST_CORRELATION = 0.3
"""A run tells of a job where the two are correlated by this much: runs of another software never
are, those of another GPU and number format still may be."""

FAR = 4.0
"""A run with so many times more or fewer GPUs, or tokens a sequence, is far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """What stands behind a learned step, in words."""

    runs: int
    """Runs that tell of such a job."""
    words: str
    far: str


def nearest_of(
    known: Sequence[KnownJob], correlations: Numbers, asked: Features, model: Model
) -> Nearest:
    """The one of `known` that is most like `asked`."""
    runs = sum(
        job.runs
        for job, correlation in zip(known, correlations, strict=True)
        if correlation >= LEAST_CORRELATION
    )
    job = known[int(correlations.argmax())]
    name = "same model" if job.model == model.name else job.model
    words = [name, f"{job.gpus:,} GPU{'' if job.gpus == 1 else 's'}", job.degrees]
    far = [*_other_stack(job.features.stack, asked.stack), *_other_scale(job.features, asked)]
    return Nearest(
        runs=runs,
        words=", ".join(words),
        far=f"nearest run {' and '.join(far)}" if far else "",
    )


def _other_stack(nearest: Stack, asked: Stack) -> list[str]:
    """What sets the stack of the nearest run apart."""
    found = []
    if not nearest.is_program_of(asked):
        found.append(f"is of other software ({nearest.software})")
    if nearest.precision != asked.precision:
        found.append(f"is in {nearest.precision}")
    if nearest.device != asked.device:
        found.append(f"is on {nearest.device}")
    return found


def _other_scale(nearest: Features, asked: Features) -> list[str]:
    """In which size the nearest run is far."""
    found = []
    sizes = (
        ("GPUs", nearest.places[0][0] - asked.places[0][0]),
        ("tokens a sequence", nearest.places[2][2] - asked.places[2][2]),
    )
    for what, apart in sizes:
        times = exp(abs(apart))
        if times >= FAR:
            found.append(f"has {times:.0f} times {'more' if apart > 0 else 'fewer'} {what}")
    return found


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
