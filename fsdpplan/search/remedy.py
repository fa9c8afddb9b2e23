"""Remedy: when nothing fits, the nearest miss and the cheapest change that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdpplan.cost.memory import available_bytes
from fsdpplan.cost.step import rank_memory
from fsdpplan.search.legality import legal_layout_problem
from fsdpplan.search.result import NearestMiss
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

_MORE_GPUS_LIMIT = 64
"""Largest multiple of the GPUs that is tried."""


def nearest_miss(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> NearestMiss:
    """The closest layout with what it needs and the cheapest change that would make it fit."""
    needed = _needed(model, cluster, training, layout)
    available = available_bytes(cluster=cluster, training=training)
    return NearestMiss(
        layout=layout,
        needed_bytes=needed,
        available_bytes=available,
        remedy=_remedy(model, cluster, training, layout),
    )


def _needed(model: Model, cluster: Cluster, training: Training, layout: Layout) -> int:
    memory = rank_memory(model=model, cluster=cluster, training=training, layout=layout)
    return memory.peak_device_bytes


def _remedy(model: Model, cluster: Cluster, training: Training, layout: Layout) -> str:
    """The first change, cheapest first, after which the closest layout fits."""
    for words, changed_training, changed_layout in _changes(training, layout):
        problem = legal_layout_problem(
            model=model, cluster=cluster, training=changed_training, layout=changed_layout
        )
        if problem:
            continue
        needed = _needed(model, cluster, changed_training, changed_layout)
        if needed <= available_bytes(cluster=cluster, training=changed_training):
            return words
    return _more_gpus(model, cluster, training, layout)


def _changes(training: Training, layout: Layout) -> Iterator[tuple[str, Training, Layout]]:
    full = replace(layout, activation_checkpointing="full")
    yield "use --activation-checkpointing full", training, full
    whole = layout.micro_batch * layout.num_microbatches
    single = replace(full, micro_batch=1, num_microbatches=whole)
    yield "use --micro-batch 1 with --activation-checkpointing full", training, single
    for sync in ("every", "reduce_scatter_only"):
        if layout.pp == 1:
            synced = replace(single, gradient_sync=sync)
            yield f"use --gradient-sync {sync}", training, synced
    if layout.sharding == "fsdp" and layout.pp == 1:
        resharded = replace(single, reshard_after_forward="always", gradient_sync="every")
        yield "use --reshard-after-forward always", training, resharded
    if layout.pp == 1 and layout.data_parallel > 1:
        flat = replace(
            single,
            sharding="fsdp",
            dp_replicate=1,
            dp_shard=layout.data_parallel,
            reshard_after_forward="always",
            gradient_sync="every",
        )
        yield f"shard over all ranks: --dp-shard {layout.data_parallel}", training, flat
    seq_len = training.seq_len
    while seq_len > 512:
        seq_len //= 2
        shorter = replace(training, seq_len=seq_len)
        yield f"use --seq-len {seq_len}", shorter, single
    yield "use less head-room: --headroom 0.02", replace(training, headroom_fraction=0.02), single


def _more_gpus(model: Model, cluster: Cluster, training: Training, layout: Layout) -> str:
    """How many GPUs would hold the shards, sharding over all of them."""
    available = available_bytes(cluster=cluster, training=training)
    factor = 2
    while factor <= _MORE_GPUS_LIMIT:
        ranks = layout.data_parallel * factor
        wider = replace(
            layout,
            sharding="fsdp",
            pp=1,
            schedule="none",
            virtual_stages=1,
            dp_replicate=1,
            dp_shard=ranks * layout.pp,
            reshard_after_forward="always",
            gradient_sync="every",
            micro_batch=1,
            activation_checkpointing="full",
        )
        if _needed(model, cluster, training, wider) <= available:
            return f"use --gpus {cluster.gpus * factor}, or GPUs with more memory"
        factor *= 2
    return "use GPUs with more memory: more of these do not help"
