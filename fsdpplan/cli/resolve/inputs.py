"""From options to the values that planning needs, each with the place that it came from.

The parts of a layout that the user fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from fsdpplan.cli.options.files import EvidenceOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.options.synonyms import SELECTIVE
from fsdpplan.cli.resolve import Resolved, Sources
from fsdpplan.cli.resolve.cluster import larger_clusters, resolve_cluster
from fsdpplan.cli.resolve.evidence import resolve_runs, with_peaks
from fsdpplan.cli.resolve.model import published_dropout, resolve_model
from fsdpplan.cli.resolve.torch import resolve_torch
from fsdpplan.cli.resolve.training import resolve_training
from fsdpplan.cost.kernels.optimizer import ASSUMED_NODE_BYTES_PER_SECOND
from fsdpplan.cost.model.params import block_tensors, elements, kind_views
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import LoadedCluster
from fsdpplan.search.pins import Pins
from fsdpplan.search.pins import pin_flag as flag
from fsdpplan.search.question import Learner, Question
from fsdpplan.search.rules.legality import question_problem
from fsdpplan.search.vocabulary import padding
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import MESH_AXES, Layout, Offload
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import (
    DEFAULT_SOURCE,
    VOCAB_SOURCE,
    BrokenRule,
    Case,
    Estimate,
    Failures,
    Terms,
)
from fsdpplan.spec.runtime import RuntimeName
from fsdpplan.spec.torch_features import slower_without
from fsdpplan.spec.training import Dropout, TorchRelease, Training, program_named
from fsdpplan.units import format_bandwidth, format_count, format_seconds


def resolve_pins(
    options: LayoutOptions, *, gpus: int, runtime: RuntimeName | None = None
) -> Resolved[Pins]:
    """The pins, refused where they contradict each other."""
    given = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if getattr(options, field.name) is not None
    }
    meant = _selective(given, runtime)
    _refuse_degrees(given, gpus)
    _refuse_schedule(given)
    _refuse_recomputation(given)
    return Resolved(
        value=Pins(**given, **_stages(given)),
        sources=tuple((f"layout.{name}", f"flag {flag(name)}") for name in given),
        assumptions=meant,
    )


def _selective(given: dict[str, Any], runtime: RuntimeName | None) -> tuple[str, ...]:
    """Put the runtime's own meaning in the place of the word, and say which it is."""
    if given.get("activation_checkpointing") != SELECTIVE:
        return ()
    is_megatron = (runtime or "").startswith("megatron")
    mode, whose = ("attention", "Megatron") if is_megatron else ("op", "torchtitan")
    given["activation_checkpointing"] = mode
    return (f"selective recomputation is {mode}, as {whose}'s (--activation-checkpointing)",)


def _refuse_degrees(given: dict[str, Any], gpus: int) -> None:
    degrees = {axis: given[axis] for axis in MESH_AXES if axis in given}
    product = prod(degrees.values())
    if gpus % product:
        words = " x ".join(f"{flag(axis)} {degree}" for axis, degree in degrees.items())
        raise SpecError(
            f"{words}{f' = {product}' if len(degrees) > 1 else ''} does not divide {gpus} GPUs; "
            f"{_divisors_hint(degrees, gpus)}"
        )
    if given.get("sharding") == "ddp" and given.get("dp_shard", 1) > 1:
        raise SpecError(
            f"--sharding ddp keeps whole copies: leave --dp-shard {given['dp_shard']} out, "
            "or use --sharding fsdp"
        )
    ep, shard_ranks = given.get("ep", 1), given.get("dp_shard", 0) * given.get("cp", 1)
    if shard_ranks and shard_ranks % ep:
        raise SpecError(
            f"--ep {ep} must divide --dp-shard x --cp = {shard_ranks}, the ranks that share one "
            "copy: use another --ep or --dp-shard"
        )


def _divisors_hint(degrees: dict[str, int], gpus: int) -> str:
    """The divisors of `gpus` beside the degree that does not divide it."""
    for axis, degree in degrees.items():
        if gpus % degree:
            below = max(d for d in range(1, min(degree, gpus) + 1) if gpus % d == 0)
            above = next((d for d in range(degree, gpus + 1) if gpus % d == 0), None)
            near = [f"{flag(axis)} {d}" for d in (below, above) if d is not None]
            return f"use {' or '.join(dict.fromkeys(near))}, or other --gpus"
    return f"their product must divide {gpus}"


def _refuse_schedule(given: dict[str, Any]) -> None:
    schedule, pp = given.get("schedule"), given.get("pp")
    if schedule == "none" and pp is not None and pp > 1:
        raise SpecError(
            f"--pp {pp} needs a schedule: type --schedule 1f1b, or leave --schedule out"
        )
    if schedule not in (None, "none") and pp == 1:
        raise SpecError(
            f"--schedule {schedule} needs a pipeline: type --pp 2 or more, or leave it out"
        )
    stages = given.get("virtual_stages", 1)
    if stages > 1 and schedule in ("gpipe", "1f1b"):
        raise SpecError(
            f"--virtual-stages {stages} does not go with --schedule {schedule}: use --schedule "
            "interleaved_1f1b"
        )


def _refuse_recomputation(given: dict[str, Any]) -> None:
    blocks = given.get("checkpoint_blocks", "all")
    if blocks != "all" and given.get("activation_checkpointing") == "none":
        raise SpecError(
            f"--checkpoint-blocks {blocks} with --activation-checkpointing none recomputes "
            "nothing: use --activation-checkpointing full, or leave --checkpoint-blocks out"
        )


def _stages(given: dict[str, Any]) -> dict[str, Any]:
    """The stages a rank that `--stage-blocks` implies, where they are not given."""
    blocks, pp = given.get("stage_blocks"), given.get("pp")
    if blocks is None:
        return {}
    if pp is None or pp == 1 or len(blocks) % pp:
        wish = f"--pp {len(blocks)}" if pp is None else f"a multiple of --pp {pp} numbers"
        raise SpecError(
            f"--stage-blocks {','.join(map(str, blocks))} names {len(blocks)} stages, which "
            f"{'needs --pp' if pp is None else f'--pp {pp} does not divide'}: use "
            f"{wish if pp != 1 else '--pp 2 or more'}"
        )
    virtual = len(blocks) // pp
    if given.get("virtual_stages", virtual) != virtual:
        raise SpecError(
            f"--stage-blocks names {len(blocks)} stages, and --pp {pp} with --virtual-stages "
            f"{given['virtual_stages']} makes {pp * given['virtual_stages']}: use --virtual-stages "
            f"{virtual}"
        )
    return {} if "virtual_stages" in given else {"virtual_stages": virtual}


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
    rules: tuple[BrokenRule, ...] | None = None
    """Rules of the field that the layout breaks; None: none was judged."""
    failures: Failures | None = None
    """What was said of how the machines fail; None: nothing."""
    terms: Terms | None = None
    """What was said of the money, energy and time of the training; None: nothing."""

    @property
    def price_per_gpu_hour(self) -> float | None:
        """In dollars; None: not said."""
        return None if self.terms is None else self.terms.price


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
    return resolve_around(
        Known(
            model=resolve_model(model),
            cluster=resolve_cluster(cluster),
            larger=larger_clusters(cluster),
            dropout=published_dropout(model),
        ),
        training=training,
        layout=layout,
        torch=lambda: resolve_torch(torch),
        evidence=evidence,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The model and the machines, however they were named."""

    model: Resolved[Model]
    cluster: Resolved[LoadedCluster]
    larger: Callable[[int], Cluster] | None
    """The same machines with another number of GPUs; None where only those are known."""
    dropout: Dropout | None = None
    """What the model's config drops."""
    may_pad: bool = True
    """The vocabulary is padded where that is faster; without, it is as a plan has it."""


def resolve_around(
    known: Known,
    *,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: Callable[[], Resolved[TorchRelease | None]],
    evidence: EvidenceOptions,
) -> Inputs:
    """The inputs that the other options ask for. Raises SpecError where they contradict each other.

    `torch` asks for the release, which may start another Python: last, and only if all else is
    sound. None: it was never said, as in plans of earlier versions.
    """
    the_model, the_cluster = known.model, known.cluster
    machines = the_cluster.value.cluster
    training, of_program = _for_program(training, the_model.value, machines)
    runtime = training.runtime
    if runtime is None and training.program is not None:
        runtime = program_named(training.program).runtimes[0]
    pins = resolve_pins(layout, gpus=machines.gpus, runtime=runtime)  # type: ignore[arg-type]
    the_training = resolve_training(
        training, model=the_model.value, cluster=machines, pins=pins.value, published=known.dropout
    )
    the_torch = torch()
    if known.may_pad:
        the_model = _padded(the_model, the_training.value, machines)
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
    peaks, larger = own.value.peaks, known.larger
    release = None if the_torch.value is None else str(the_torch.value)
    return Inputs(
        model=the_model.value,
        cluster=with_peaks(machines, peaks),
        training=replace(the_training.value, torch=release),
        pins=pins.value,
        sources=tuple(source for part in parts for source in part.sources),
        assumptions=(
            *(text for part in parts for text in part.assumptions),
            *of_program,
            *assumed_host(pins.value.offload, machines),
        ),
        warnings=tuple(text for part in parts for text in part.warnings),
        parts=tuple(with_peaks(part, peaks) for part in the_cluster.value.parts),
        larger=None if larger is None else lambda gpus: with_peaks(larger(gpus), peaks),
        learner=own.value.learner,
    )


def _padded(found: Resolved[Model], training: Training, cluster: Cluster) -> Resolved[Model]:
    """The model with a padded vocabulary, where nothing was said of it and that is faster."""
    if VOCAB_SOURCE in dict(found.sources):
        return found
    gain = padding(found.value, training=training, cluster=cluster)
    if gain is None:
        return found
    words = (
        f"padded, head and loss take {format_seconds(gain.seconds)} per sequence, not "
        f"{format_seconds(gain.plain_seconds)} (--vocab-multiple 1: no padding)"
    )
    return replace(
        found,
        value=gain.model,
        sources=(*found.sources, (VOCAB_SOURCE, DEFAULT_SOURCE)),
        assumptions=(*found.assumptions, words),
    )


BYTES_OF_A_BLOCK = 12
"""Of each parameter of a block that FSDP gathers whole, at the least: it and the next one in bf16,
its gradients, and what these are reduced from in fp32."""


def _for_program(
    training: TrainingOptions, model: Model, cluster: Cluster
) -> tuple[TrainingOptions, tuple[str, ...]]:
    """The training with a program that can have such blocks, where none was asked for; and what is
    taken for granted of blocks that no measured run has."""
    lacking = model.unlike_reference
    said: tuple[str, ...] = ()
    if model.has_unmeasured_mixers:
        said = (
            f"what mixes tokens in {model.name} otherwise than by attention over all keys is "
            "priced by FLOPs and bytes of its fused kernels, and no measured run is behind it: the "
            "band is wider by a factor of two on its part",
        )
    if not lacking or training.program is not None or training.runtime is not None:
        return training, said
    why = f"since fsdpplan's own trainer cannot build {lacking}"
    largest = elements(block_tensors(kind_views(model)[-1]))
    memory = cluster.device.memory_bytes
    if memory is not None and BYTES_OF_A_BLOCK * largest > memory:
        words = (
            f"a program of yours that splits experts as Megatron Core does, {why}, and a block of "
            f"{format_count(largest)} parameters is too much to gather whole (--runtime)"
        )
        return replace(training, runtime="megatron"), (*said, words)
    return replace(training, program="hf"), (
        *said,
        f"a Hugging Face model of yours, {why} (--program)",
    )


def assumed_host(offload: Offload | None, machines: Cluster) -> tuple[str, ...]:
    """What is taken for granted of the host, where it has work to do and its memory is not known:
    by what rate it is priced, and that state fits into it."""
    if offload != "cpu":
        return ()
    rate = format_bandwidth(ASSUMED_NODE_BYTES_PER_SECOND)
    priced = f"host memory of {rate} (host_memory_bytes_per_second in its profile)"
    fitting = "host memory is large enough for what is offloaded (--host-memory)"
    return (
        *((priced,) if machines.host_memory_bytes_per_second is None else ()),
        *((fitting,) if machines.host_memory_bytes is None else ()),
    )


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
