"""Legal batch: a default global batch with which some layout can be trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from fsdpplan.search.enumerate import divisors
from fsdpplan.search.pins import Pins, default_global_batch
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.search.rules.program import vocabulary_of
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import GradientSync, Layout, Sharding
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

LEAST_LOCAL_TOKENS = 1024
"""Of a sequence on a context-parallel rank, for a batch to count on it: with fewer, collectives
take longer than what they bring together."""


def legal_global_batch(
    *, model: Model, cluster: Cluster, training: Training, pins: Pins, usual: int | None = None
) -> int:
    """The usual batch, where a layout that the pins allow can train it; else the nearest to it that
    one can, and the usual one again where none can train any.

    On more GPUs than there are sequences, several GPUs must work on each: as many as tensor
    parallelism, context parallelism and pipelines that are full allow.
    """
    if usual is None:
        usual = default_global_batch(seq_len=training.seq_len, gpus=cluster.gpus)
    shapes = list(_shapes(cluster, training, pins))
    batches = {_nearest(usual, layout): layout for layout in reversed(shapes)}
    for batch in sorted(batches, key=lambda batch: (abs(batch - usual), batch)):
        layout = batches[batch]
        number = batch // layout.data_parallel
        asked = replace(training, global_batch=batch)
        for plain in _policies(replace(layout, num_microbatches=number), training):
            case = Case(model=model, cluster=cluster, training=asked, layout=plain)
            if first_problem(case) is None:
                return batch
    return usual


def _policies(layout: Layout, training: Training) -> Iterator[Layout]:
    """`layout`, and for a program of others the same as it shards and reduces."""
    yield layout
    if vocabulary_of(training.program) is None:
        return
    shardings: tuple[Sharding, ...] = ("fsdp", "zero1", "ddp")
    for sharding in shardings:
        for sync in get_args(GradientSync):
            if sharding != "ddp" or layout.shard_ranks == 1:
                keeps = sharding == "fsdp" and layout.pp > 1
                yield replace(
                    layout,
                    sharding=sharding,
                    gradient_sync=sync,
                    reshard_after_forward="never" if keeps else "always",
                )


def _nearest(usual: int, layout: Layout) -> int:
    """The batch of `layout` that is nearest to the usual one: full pipelines, whole ranks."""
    ranks = layout.data_parallel * layout.micro_batch
    return ranks * max(layout.pp, round(usual / ranks))


def _shapes(cluster: Cluster, training: Training, pins: Pins) -> Iterator[Layout]:
    """The plainest layout of each spread of the ranks; those that leave sequences whole first."""
    gpus = cluster.gpus
    contexts = [cp for cp in divisors(gpus) if cp * LEAST_LOCAL_TOKENS <= training.seq_len]
    for cp in [pins.cp] if pins.cp else contexts or [1]:
        for tp in [pins.tp] if pins.tp else divisors(gpus):
            for pp in [pins.pp] if pins.pp else divisors(gpus):
                ranks, left = divmod(gpus, cp * tp * pp)
                if left or (tp > cluster.levels[0].domain_gpus and pins.tp is None):
                    continue
                if layout := _plainest(pp=pp, ranks=ranks, cp=cp, tp=tp, pins=pins):
                    yield layout


def _plainest(*, pp: int, ranks: int, cp: int, tp: int, pins: Pins) -> Layout | None:
    shard = pins.dp_shard or (ranks // pins.dp_replicate if pins.dp_replicate else ranks)
    if not shard or ranks % shard or (pins.dp_replicate or ranks // shard) != ranks // shard:
        return None
    is_ddp = shard * cp == 1
    return Layout(
        pp=pp,
        dp_replicate=ranks // shard,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        sharding="ddp" if is_ddp else "fsdp",
        reshard_after_forward="never" if pp > 1 and not is_ddp else "always",
        gradient_sync="last" if pp > 1 else "every",
        micro_batch=pins.micro_batch or 1,
        schedule="1f1b" if pp > 1 else "none",
        sequence_parallel=tp > 1,
        loss_parallel=tp > 1,
        compile=False,
    )
