"""From options to the values that planning needs, each with the place that it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fsdpplan.cli.options.files import EvidenceOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.resolve import Resolved, Sources
from fsdpplan.cli.resolve.cluster import larger_clusters, resolve_cluster
from fsdpplan.cli.resolve.evidence import resolve_runs, with_peaks
from fsdpplan.cli.resolve.layout import resolve_pins
from fsdpplan.cli.resolve.model import resolve_model
from fsdpplan.cli.resolve.torch import resolve_torch
from fsdpplan.cli.resolve.training import resolve_training
from fsdpplan.cost.kernels.host import ASSUMED_NODE_BYTES_PER_SECOND
from fsdpplan.errors import SpecError
from fsdpplan.search.advice.remedies import Asked, remedy
from fsdpplan.search.learned import Learner
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.search.rules.legality import question_problem
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.program import program_named
from fsdpplan.spec.torch_features import slower_without
from fsdpplan.spec.training import Training
from fsdpplan.units import format_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All that a search or an estimate is given."""

    model: Model
    cluster: Cluster
    training: Training
    pins: Pins
    sources: Sources
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    parts: tuple[Cluster, ...] = ()
    """Of a cluster with several types of nodes: the nodes of each type alone."""
    larger: Callable[[int], Cluster] | None = None
    """The same machines with another number of GPUs; None where only those found are known."""
    learner: Learner | None = None
    """What measured runs say; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLayout:
    """One layout and its prediction."""

    inputs: Inputs
    layout: Layout
    estimate: Estimate
    available_bytes: int
    """The highest peak that is planned with, by head-room and chance to fit."""

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU has room for it, as much as a plan must leave."""
        return self.estimate.memory.peak_device_bytes <= self.available_bytes


def resolve(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
) -> Inputs:
    """The inputs that the options ask for. Raises SpecError where they contradict each other."""
    the_model = resolve_model(model)
    the_cluster = resolve_cluster(cluster)
    machines = the_cluster.value.cluster
    runtime = training.runtime
    if runtime is None and training.program is not None:
        runtime = program_named(training.program).runtimes[0]
    pins = resolve_pins(layout, gpus=machines.gpus, runtime=runtime)  # type: ignore[arg-type]
    the_training = resolve_training(
        training, model=the_model.value, cluster=machines, pins=pins.value
    )
    the_torch = resolve_torch(torch)
    own = resolve_runs(
        evidence, model=the_model.value, cluster=machines, training=the_training.value
    )
    parts: tuple[Resolved[Any], ...] = (
        the_model,
        the_cluster,
        the_training,
        the_torch,
        pins,
        own,
    )
    peaks, larger = own.value.peaks, larger_clusters(cluster)
    return Inputs(
        model=the_model.value,
        cluster=with_peaks(machines, peaks),
        training=replace(the_training.value, torch=str(the_torch.value)),
        pins=pins.value,
        sources=tuple(source for part in parts for source in part.sources),
        assumptions=(
            *(text for part in parts for text in part.assumptions),
            *_assumed_host(pins.value, machines),
        ),
        warnings=tuple(text for part in parts for text in part.warnings),
        parts=tuple(with_peaks(part, peaks) for part in the_cluster.value.parts),
        larger=None if larger is None else lambda gpus: with_peaks(larger(gpus), peaks),
        learner=own.value.learner,
    )


def _assumed_host(pins: Pins, machines: Cluster) -> tuple[str, ...]:
    """By what the host is priced, where it has work to do and its memory is not known."""
    if pins.offload != "cpu" or machines.host_memory_bytes_per_second is not None:
        return ()
    rate = format_bandwidth(ASSUMED_NODE_BYTES_PER_SECOND)
    return (f"memory of a node at {rate} (host_memory_bytes_per_second of its profile)",)


def refuse_question(inputs: Inputs) -> None:
    """Raise SpecError where no layout at all could be trained."""
    problem = question_problem(
        model=inputs.model, cluster=inputs.cluster, training=inputs.training, pins=inputs.pins
    )
    if problem is not None:
        raise SpecError(problem)


def slower_words(inputs: Inputs, layout: Layout) -> tuple[str, ...]:
    """What the release of torch makes slower than predicted."""
    return tuple(
        f"torch {inputs.training.torch} has no {feature.name} ({feature.since} has): the trainer "
        f"{feature.done_without}, and {feature.slower}"
        for feature in slower_without(case_of(inputs, layout))
    )


def case_of(inputs: Inputs, layout: Layout) -> Case:
    """`layout` as what is asked of the cost model."""
    return Case(model=inputs.model, cluster=inputs.cluster, training=inputs.training, layout=layout)


def question_of(inputs: Inputs) -> Question:
    """What a search is asked."""
    return Question(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        pins=inputs.pins,
        learner=inputs.learner,
    )


def remedy_words(inputs: Inputs, closest: Layout | None) -> str:
    """What to type, tried by a search of its own."""
    # What fits does not hang on what runs say of times.
    question = replace(question_of(inputs), learner=None)
    found = remedy(Asked(question=question, larger=inputs.larger), closest)
    return found or "GPUs with more memory are needed: more of these do not help"
