"""A saved plan asked again: its question as the options that it was typed with, and others laid
over them.

What was typed stays as it was, what was a default is one again, and what a plan fixed of its layout
stays fixed, so that the answer is that of `recommend` with all of these options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fsdpplan.cli.options.files import EvidenceOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.resolve import Resolved, flag
from fsdpplan.cli.resolve.cluster import larger_clusters, resolve_cluster
from fsdpplan.cli.resolve.evidence import resolve_runs, with_peaks
from fsdpplan.cli.resolve.inputs import Inputs, Known, resolve_around
from fsdpplan.cli.resolve.model import published_dropout, resolve_model
from fsdpplan.cli.resolve.torch import resolve_torch
from fsdpplan.cli.resolve.training import (
    ADAPTERS,
    FP8_POLICIES,
    OF_THE_QUESTION,
    with_data,
)
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import LoadedCluster, load_cluster, with_inter, with_intra
from fsdpplan.search.pins import Pins
from fsdpplan.spec.adapters import Adapters
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.plan import DEFAULT_SOURCE, TORCH_SOURCE, VOCAB_SOURCE, Plan
from fsdpplan.spec.training import TorchRelease

Options = TypeVar("Options")

NAMED_OTHERWISE = {"headroom": "headroom_fraction", "fits": "fits_fraction", "pack": "packed"}
"""Option of a training -> its field, where they differ."""

A_FLAG = "flag "
"""How the source of what was typed begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options laid over those of a saved plan; what is None was not given."""

    model: ModelOptions
    cluster: ClusterOptions
    training: TrainingOptions
    layout: LayoutOptions
    torch: TorchOptions
    evidence: EvidenceOptions
    free: bool = False
    """What the plan fixed of its layout is searched, too."""


def as_planned(plan: Plan, evidence: EvidenceOptions) -> Inputs:
    """What the plan was asked, with what runs say today."""
    own = resolve_runs(evidence, model=plan.model, cluster=plan.cluster, training=plan.training)
    return Inputs(
        model=plan.model,
        cluster=with_peaks(plan.cluster, own.value.peaks),
        training=plan.training,
        pins=Pins(**_given(layout_options(plan))),
        sources=plan.sources,
        assumptions=own.assumptions,
        warnings=own.warnings,
        learner=own.value.learner,
        failures=plan.failures,
        terms=plan.terms,
    )


def machines_of(plan: Plan, inputs: Inputs) -> Callable[[int], Cluster]:
    """The machines of the plan with another number of GPUs; raises SpecError where the plan does
    not say how those would be joined."""

    def resized(gpus: int) -> Cluster:
        machines = _machines(plan, ClusterOptions(gpus=gpus))["cluster"].value.cluster
        return with_peaks(machines, inputs.cluster.device.learned_peaks)

    return resized


def asked_again(plan: Plan, asked: Asked) -> Inputs:
    """The plan's question with other options laid over. Raises SpecError where they contradict each
    other, or the plan does not know what they ask for."""
    layout = asked.layout if asked.free else _over(layout_options(plan), asked.layout)
    training = _over(training_options(plan), _with_data(plan, asked.training))
    switch = training.precision_switch or "none"
    if training.precision != "fp8" and switch == "none" and asked.training.precision is not None:
        typed = {name: getattr(asked.training, name) for name in FP8_POLICIES}
        training = replace(training, **typed)
    inputs = resolve_around(
        Known(
            model=_model(plan, asked.model),
            dropout=published_dropout(asked.model),
            may_pad=bool(_given(asked.model)) or _is_padded_by_default(plan),
            **_machines(plan, asked.cluster),
        ),
        training=training,
        layout=layout,
        torch=lambda: _torch(plan, asked.torch),
        evidence=asked.evidence,
    )
    terms = plan.terms and plan.terms.on(inputs.cluster, instead_of=plan.cluster)
    lost = plan.terms and terms and plan.terms.price is not None and terms.price is None
    said = (
        f"what a GPU hour costs on {inputs.cluster.device.name} is not known: the plan's price is "
        f"of {plan.cluster.device.name} (fsdpplan compare --price)"
    )
    return replace(
        inputs,
        failures=plan.failures,
        terms=terms,
        assumptions=(*inputs.assumptions, *([said] if lost else [])),
    )


def _with_data(plan: Plan, typed: TrainingOptions) -> TrainingOptions:
    """What was typed, its data counted in sequences of the plan's."""
    if typed.data is None:
        return typed
    planned = plan.training
    counted = with_data(
        replace(
            typed,
            seq_len=typed.seq_len or planned.seq_len,
            pack=planned.packed if typed.pack is None else typed.pack,
        )
    )
    return replace(counted, seq_len=typed.seq_len, pack=typed.pack)


def machines_by_number(plan: Plan, typed: ClusterOptions) -> Callable[[int], Cluster]:
    """The plan's machines, with what was typed, by their number of GPUs; each raises SpecError
    where the plan does not know so many."""

    def resized(gpus: int) -> Cluster:
        cluster: Cluster = _machines(plan, replace(typed, gpus=gpus))["cluster"].value.cluster
        return with_peaks(cluster, plan.cluster.device.learned_peaks)

    return resized


def is_changed(asked: Asked) -> bool:
    """Whether anything is laid over the plan."""
    groups = (asked.model, asked.cluster, asked.training, asked.layout, asked.torch)
    return asked.free or any(_given(group) for group in groups)


def _given(options: Any) -> dict[str, Any]:
    """The options that were given, and their values."""
    pairs = ((field.name, getattr(options, field.name)) for field in fields(options))
    return {name: value for name, value in pairs if value is not None}


def _over(under: Options, over: Options) -> Options:
    """`under`, with what was given of `over`."""
    return replace(under, **_given(over))  # type: ignore[type-var]


def training_options(plan: Plan) -> TrainingOptions:
    """What was typed of its training; of a plan that does not say so, all of it."""
    sources = dict(plan.sources)
    values = {
        field.name: getattr(plan.training, NAMED_OTHERWISE.get(field.name, field.name))
        for field in fields(TrainingOptions)
        if field.name not in OF_THE_QUESTION
        and sources.get(f"training.{field.name}") != DEFAULT_SOURCE
    }
    if "fp8" not in (plan.training.precision, plan.training.later_precision):
        values = {name: value for name, value in values.items() if name not in FP8_POLICIES}
    return TrainingOptions(**values, **_adapter_options(plan.training.adapters))


def _adapter_options(adapters: Adapters | None) -> dict[str, Any]:
    """The options of LoRA that make these adapters."""
    if adapters is None:
        return {}
    given = {name: getattr(adapters, field) for name, field in ADAPTERS.items()}
    return {"lora": adapters.rank, **given}


def layout_options(plan: Plan) -> LayoutOptions:
    """What was fixed of its layout."""
    sources = dict(plan.sources)
    return LayoutOptions(
        **{
            field.name: getattr(plan.layout, field.name)
            for field in fields(LayoutOptions)
            if sources.get(f"layout.{field.name}", "").startswith(A_FLAG)
        }
    )


def _is_padded_by_default(plan: Plan) -> bool:
    return (VOCAB_SOURCE, DEFAULT_SOURCE) in plan.sources


def _model(plan: Plan, typed: ModelOptions) -> Resolved[Any]:
    given = _given(typed)
    if not given.keys() - {"vocab_multiple"}:
        model, padding = plan.model, (VOCAB_SOURCE, DEFAULT_SOURCE)
        if _is_padded_by_default(plan):  # as is decided anew
            model = replace(model, vocab_multiple=1)
        model = replace(model, **given)
        sources = tuple(
            pair
            for pair in plan.sources
            if pair[0].partition(".")[0] == "model" and pair != padding
        )
        added = tuple((f"model.{name}", f"{A_FLAG}{flag(name)}") for name in given)
        return Resolved(value=model, sources=(*sources, *added))
    return resolve_model(typed)


def _torch(plan: Plan, typed: TorchOptions) -> Resolved[TorchRelease | None]:
    if _given(typed):
        return resolve_torch(typed)
    sources = ((TORCH_SOURCE, plan.torch_source),)
    return Resolved(value=plan.training.torch_release, sources=sources)


def _machines(plan: Plan, typed: ClusterOptions) -> Mapping[str, Any]:
    """The machines, and the same with other numbers of GPUs where they are of a known profile."""
    options = cluster_options(plan)
    if typed.hardware is not None:
        gpus = plan.cluster.gpus if typed.gpus is None else typed.gpus
        options = replace(typed, gpus=gpus)
    elif options is not None:
        options = _of_use(_over(options, typed), typed)
    if options is not None:
        return {"cluster": resolve_cluster(options), "larger": larger_clusters(options)}
    cluster = _own_machines(plan.cluster, typed)
    loaded = LoadedCluster(
        cluster=cluster,
        sources=tuple(pair for pair in plan.sources if pair[0].partition(".")[0] == "cluster"),
    )
    return {"cluster": Resolved(value=loaded, sources=loaded.sources), "larger": None}


def _of_use(options: ClusterOptions, typed: ClusterOptions) -> ClusterOptions:
    """`options` without bandwidths of the plan that fewer GPUs have no use for."""
    plain = resolve_cluster(replace(options, intra_bw=None, inter_bw=None)).value.cluster
    return replace(
        options,
        intra_bw=typed.intra_bw if plain.gpus_per_node == 1 else options.intra_bw,
        inter_bw=typed.inter_bw if plain.nodes == 1 else options.inter_bw,
    )


def cluster_options(plan: Plan) -> ClusterOptions | None:
    """The profile and flags that the plan's machines are made by; None where none here makes them:
    found on another machine, read from a file, or of another version."""
    cluster, sources = plan.cluster, dict(plan.sources)
    typed = {field: source for field, source in sources.items() if source.startswith(A_FLAG)}
    levels = {"--intra-bw": cluster.levels[0], "--inter-bw": cluster.levels[-1]}
    bandwidths = {
        word: level.port_bandwidth_bytes_per_second
        for word, level in levels.items()
        if typed.get(f"cluster.levels.{level.name}.ports", "").startswith(f"{A_FLAG}{word}")
    }
    domain = cluster.nvlink_domain or cluster.levels[0]
    options = ClusterOptions(
        hardware=cluster.name,
        gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node if "cluster.gpus_per_node" in typed else None,
        domain_gpus=(
            domain.domain_gpus if f"cluster.levels.{domain.name}.domain_gpus" in typed else None
        ),
        gpu=cluster.device.name if "cluster.device" in typed else None,
        intra_bw=bandwidths.get("--intra-bw"),
        inter_bw=bandwidths.get("--inter-bw"),
        host_memory=cluster.host_memory_bytes if "cluster.host_memory_bytes" in typed else None,
    )
    try:
        same = load_cluster(
            cluster.name,
            gpus=options.gpus,
            gpus_per_node=options.gpus_per_node,
            domain_gpus=options.domain_gpus,
            device=options.gpu,
            intra_bandwidth_bytes_per_second=options.intra_bw,
            inter_bandwidth_bytes_per_second=options.inter_bw,
            host_memory_bytes=options.host_memory,
        ).cluster
    except SpecError:
        return None
    return options if same == with_peaks(cluster, None) else None


def _own_machines(cluster: Cluster, typed: ClusterOptions) -> Cluster:
    """The machines as the plan has them, as far as it knows how they would be otherwise."""
    given = _given(typed)
    for name in ("gpus_per_node", "domain_gpus", "gpu"):
        if name in given:
            raise _unknown(cluster, flag(name))
    if typed.gpus is not None and typed.gpus != cluster.gpus:
        cluster = _resized(cluster, typed.gpus)
    if typed.host_memory is not None:
        cluster = replace(cluster, host_memory_bytes=typed.host_memory)
    if typed.intra_bw is not None:
        cluster = with_intra(cluster, typed.intra_bw)
    return cluster if typed.inter_bw is None else with_inter(cluster, typed.inter_bw)


def _resized(cluster: Cluster, gpus: int) -> Cluster:
    """More or fewer whole nodes that are joined as those of the plan."""
    *inner, outer = cluster.levels
    nodes, left = divmod(gpus, cluster.gpus_per_node)
    is_plain = all(level.domain_gpus <= cluster.gpus_per_node for level in inner)
    if left or nodes < 2 or cluster.nodes < 2 or not is_plain or cluster.weak:
        raise _unknown(cluster, f"--gpus {gpus}")
    return replace(cluster, gpus=gpus, levels=(*inner, replace(outer, domain_gpus=gpus)))


def _unknown(cluster: Cluster, words: str) -> SpecError:
    return SpecError(
        f"the plan does not say what {words} makes of its machines, which no profile here called "
        f"{cluster.name} has as they are: name them by --hardware, too"
    )
