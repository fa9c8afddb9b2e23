"""Nearest: which of the known runs tells most of a job, and how far even that one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from fsdpplan.spec.model import Model
from fsdpplan.validate.learn.features import Features, Stack
from fsdpplan.validate.learn.process import KnownJob

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
