"""Remedy: when nothing fits, the nearest miss and the cheapest change that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdpplan.cost.memory.peak import available_bytes, rank_memory
from fsdpplan.cost.memory.peak_band import peak_log_error
from fsdpplan.search.pins import Pins, pin_flag
from fsdpplan.search.result import NearestMiss
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

_MOST_GPUS = 16_384
"""Largest number of GPUs that is tried."""

LEAST_HEADROOM, LEAST_CHANCE = 0.02, 0.7
"""What is still said to who has no other way: past either, a run is a matter of luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Other inputs, and what to type for them."""

    words: str
    cluster: Cluster
    training: Training
    layout: Layout


def nearest_miss(case: Case, *, pins: Pins) -> NearestMiss:
    """The closest layout with what it needs and the cheapest change that would make it fit."""
    cluster, training, layout = case.cluster, case.training, case.layout
    as_asked = Change(words="", cluster=cluster, training=training, layout=layout)
    return NearestMiss(
        layout=layout,
        needed_bytes=rank_memory(case).peak_device_bytes,
        available_bytes=available_bytes(cluster=cluster, training=training),
        remedy=_remedy(case.model, as_asked, pins),
    )


def changes(model: Model, asked: Change) -> Iterator[Change]:
    """Changes on the same GPUs after which the closest layout fits, cheapest first."""
    return (change for change in _changes(asked) if _fits(model, change))


def offloaded(model: Model, asked: Change) -> Iterator[Change]:
    """The same with shards and optimizer on the host."""
    return (change for change in _offloaded(asked) if _fits(model, change))


def _remedy(model: Model, asked: Change, pins: Pins) -> str:
    """The first change, cheapest first, after which the closest layout fits; the host's memory is
    the last resort, and named beside more GPUs."""
    for change in _changes(asked):
        if _fits(model, change):
            return change.words + _without_pins(change, pins)
    last = [c.words + _without_pins(c, pins) for c in _offloaded(asked) if _fits(model, c)][:1]
    for change in _more_gpus(asked):
        if _fits(model, change):
            return "; or, much slower, ".join((change.words + _without_pins(change, pins), *last))
    return last[0] if last else "use GPUs with more memory: more of these do not help"


def _offloaded(asked: Change) -> Iterator[Change]:
    """Shards and optimizer on the host, the rest as lean as can be."""
    if asked.cluster.device.kind == "cpu" or asked.layout.data_parallel * asked.layout.cp == 1:
        return
    for tp in dict.fromkeys((1, asked.layout.tp)):
        words = "keep shards and optimizer on the host: --offload cpu"
        change = _sharded_over_all(replace(asked, words=words), tp=tp)
        if change.training == asked.training:
            yield replace(change, layout=replace(change.layout, offload="cpu"))


def _fits(model: Model, change: Change) -> bool:
    case = Case(model=model, cluster=change.cluster, training=change.training, layout=change.layout)
    available = available_bytes(cluster=change.cluster, training=change.training)
    return legal_layout_problem(case) is None and rank_memory(case).peak_device_bytes <= available


def _without_pins(change: Change, pins: Pins) -> str:
    """The flags that stand in the way of the change and have to go."""
    flags = [
        pin_flag(name)
        for name, value in pins.given().items()
        if getattr(change.layout, name) != value
    ]
    kept = [flag for flag in flags if flag not in change.words]
    return f", without {' '.join(kept)}" if kept else ""


def _changes(asked: Change) -> Iterator[Change]:
    """Changes of policies, then of the training, on the same GPUs."""
    layout, training = asked.layout, asked.training
    full = replace(layout, activation_checkpointing="full", checkpoint_blocks="all")
    yield replace(asked, words="use --activation-checkpointing full", layout=full)
    whole = layout.micro_batch * layout.num_microbatches
    single = replace(full, micro_batch=1, num_microbatches=whole)
    words = "use --micro-batch 1 with --activation-checkpointing full"
    yield replace(asked, words=words, layout=single)
    if layout.pp == 1:
        for sync in ("every", "reduce_scatter_only"):
            synced = replace(single, gradient_sync=sync)
            yield replace(asked, words=f"use --gradient-sync {sync}", layout=synced)
        yield from _sharding_changes(replace(asked, layout=single))
    seq_len = training.seq_len
    while seq_len > 512:
        seq_len //= 2
        shorter = replace(training, seq_len=seq_len)
        yield replace(asked, words=f"use --seq-len {seq_len}", training=shorter, layout=single)
    yield from _less_room(replace(asked, layout=single))


def _less_room(asked: Change) -> Iterator[Change]:
    """Less head-room, and a smaller chance to fit where that is what refuses."""
    training = asked.training
    values: dict[str, float] = {}
    if training.headroom_fraction > LEAST_HEADROOM:
        values["headroom_fraction"] = LEAST_HEADROOM
    if training.fits_fraction > LEAST_CHANCE and peak_log_error(asked.cluster.device):
        values["fits_fraction"] = LEAST_CHANCE
    if not values:
        return
    flags = " ".join(
        f"--{name.removesuffix('_fraction')} {100 * value:.0f}%" for name, value in values.items()
    )
    words = f"plan with less room: {flags}"
    yield replace(asked, words=words, training=replace(training, **values))  # type: ignore[arg-type]


def _sharding_changes(asked: Change) -> Iterator[Change]:
    """Reshard always, then shard over all ranks."""
    layout = asked.layout
    always = replace(layout, reshard_after_forward="always", gradient_sync="every")
    if layout.sharding == "fsdp":
        yield replace(asked, words="use --reshard-after-forward always", layout=always)
    if layout.data_parallel > 1:
        ranks = layout.data_parallel
        flat = replace(always, sharding="fsdp", dp_replicate=1, dp_shard=ranks)
        yield replace(asked, words=f"shard over all ranks: --dp-shard {ranks}", layout=flat)


def _more_gpus(asked: Change) -> Iterator[Change]:
    """More GPUs, twice as many each time: sharding over all of them, also with TP inside."""
    for gpus in _gpu_counts(asked.cluster):
        cluster = with_gpus(asked.cluster, gpus)
        words = f"use --gpus {gpus}, or GPUs with more memory"
        for tp in dict.fromkeys((1, asked.layout.tp, 8)):
            if gpus % tp == 0:
                yield _sharded_over_all(replace(asked, words=words, cluster=cluster), tp=tp)


def _gpu_counts(cluster: Cluster) -> Iterator[int]:
    """Numbers of GPUs that fill nodes: twice as many nodes, or powers of two beyond one node."""
    gpus = 2 * cluster.gpus if cluster.nodes > 1 else 2 ** cluster.gpus.bit_length()
    while gpus <= _MOST_GPUS:
        yield gpus
        gpus *= 2


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """The same devices, more of them; only memory and legality are asked of it."""
    *inner, outer = cluster.levels
    outer = replace(outer, domain_gpus=max(outer.domain_gpus, gpus), whole_gpus=None)
    return replace(
        cluster,
        gpus=gpus,
        gpus_per_node=cluster.gpus_per_node if cluster.nodes > 1 else gpus,
        levels=(*inner, outer),
    )


def _sharded_over_all(asked: Change, *, tp: int) -> Change:
    """FSDP over all ranks but the tensor-parallel ones, with all that saves memory.

    The global batch grows where the ranks do not divide it.
    """
    ranks = asked.cluster.gpus // tp
    training, words = asked.training, asked.words
    if training.global_batch % ranks:
        batch = -(-training.global_batch // ranks) * ranks
        training = replace(training, global_batch=batch)
        words = words.replace(", or", f" with --global-batch {batch}, or")
    layout = Layout(
        dp_shard=ranks,
        tp=tp,
        sharding="fsdp",
        reshard_after_forward="always",
        gradient_sync="every",
        micro_batch=1,
        num_microbatches=training.global_batch // ranks,
        activation_checkpointing="full",
        sequence_parallel=tp > 1,
        loss_parallel=tp > 1,
        compile=asked.layout.compile,
    )
    return replace(asked, words=words, training=training, layout=layout)
