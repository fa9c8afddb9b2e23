"""Variants: layouts that differ from one in a single setting."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.schedule.actions import ACTIVE_STAGES
from fsdpplan.cost.schedule.stages import layout_stage_blocks, most_stages
from fsdpplan.search.enumerate import (
    LOOPED_SCHEDULES,
    Degrees,
    divisors,
    reshard_policies,
)
from fsdpplan.search.question import Question
from fsdpplan.search.rules.legality import piece_counts
from fsdpplan.search.splits import stage_splits
from fsdpplan.spec.conventions import V_SCHEDULES
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, GradientSync, Layout, Reshard
from fsdpplan.spec.values import replace

DDP_BUCKETS_BYTES = (100 * 2**20, 400 * 2**20)
"""Buckets of DDP beside its default."""


SYNCS: dict[bool, tuple[GradientSync, ...]] = {
    False: ("every", "last"),
    True: ("every", "reduce_scatter_only", "last"),
}
"""When gradients are reduced, by whether there are copies of shards."""


def overlapped(asked: Question, layout: Layout) -> tuple[Layout, ...]:
    """`layout` with tensor-parallel collectives beside their matmuls, where that can be had."""
    can_overlap = layout.compile or asked.training.traits.fused_kernels
    if layout.tp == 1 or not can_overlap or asked.pins.async_tp is not None:
        return ()
    if asked.cluster.peerless_level(layout.tp) is not None:
        return ()
    return (replace(layout, async_tp=True),)


def reshards(asked: Question, d: Degrees) -> tuple[Reshard, ...]:
    """When gathered parameters are freed, as far as there is a choice, in the order of growing
    memory."""
    return reshard_policies(
        d=d,
        cluster=asked.cluster,
        pins=asked.pins,
        reshards_stages=asked.training.traits.reshards_stages,
    )


def changed(asked: Question, layout: Layout) -> Iterator[Layout]:
    """`layout` with one setting changed that the user has not fixed, recomputation and buckets
    apart; legal or not."""
    counts = piece_counts(layout, training=asked.training, pins=asked.pins)
    for pieces in (1, *counts) if counts else ():
        yield replace(layout, loss_chunks=pieces)
    if asked.pins.sharding is None and layout.sharding == "ddp" and layout.data_parallel == 1:
        yield alone_as_fsdp(layout)
    if layout.sharding != "fsdp" or (layout.pp > 1 and not asked.training.traits.reshards_stages):
        return
    if asked.pins.reshard_after_forward is None:
        is_open = max(layout.pp, layout.ep, layout.tp) == 1
        some = divisors(layout.shard_ranks)[1:-1] if is_open else ()
        every: tuple[Reshard, ...] = ("always", *some, "never")
        for reshard in every:
            yield replace(layout, reshard_after_forward=reshard)
    is_open = asked.pins.gradient_sync is None and layout.pp == 1
    if is_open and layout.num_microbatches > 1:
        for sync in SYNCS[layout.dp_replicate > 1]:
            yield replace(layout, gradient_sync=sync)


def buckets(asked: Question, layout: Layout) -> Iterator[Layout]:
    """Other buckets; of FSDP those with which a stage has fewer units: for each number of them the
    most even ones."""
    if layout.sharding == "fsdp" and asked.pins.wrap_blocks is None:
        blocks = max(layout_stage_blocks(model=asked.model, layout=layout))
        sizes = sorted({-(-blocks // units) for units in range(1, blocks)})
        yield from (replace(layout, wrap_blocks=n) for n in sizes)
    is_ddp = layout.sharding == "ddp" and layout.dp_replicate > 1
    if is_ddp and asked.pins.ddp_bucket_bytes is None:
        yield from (replace(layout, ddp_bucket_bytes=size) for size in DDP_BUCKETS_BYTES)


def restaged(asked: Question, layout: Layout) -> Iterator[Layout]:
    """`layout` with another number of stages a rank, another schedule, another split of the blocks;
    legal or not."""
    if layout.pp == 1:
        return
    pins, most = asked.pins, most_stages(asked.model.layers) // layout.pp
    even = replace(layout, stage_blocks=pins.stage_blocks or ())
    if pins.stage_blocks is None:
        if layout.schedule in LOOPED_SCHEDULES and pins.virtual_stages is None:
            yield from (_with_stages(even, n) for n in range(2, most + 1))
        for blocks in stage_splits(asked.case(layout)):
            yield replace(layout, stage_blocks=blocks)
    if pins.schedule is not None or asked.training.runtime != "fsdp2":
        return
    if layout.schedule == "1f1b":
        yield replace(even, schedule="gpipe")
    compiled = layout.compile
    for schedule in (*LOOPED_SCHEDULES, *V_SCHEDULES):
        is_split = schedule in SPLIT_BACKWARD_SCHEDULES
        stages = 2 if schedule in V_SCHEDULES else max(2, layout.virtual_stages)
        if stages > most or stages != (pins.virtual_stages or stages):
            continue
        if is_split and asked.pins.compile:
            continue
        yield replace(
            even,
            schedule=schedule,
            virtual_stages=stages,
            compile=compiled and not is_split,
            loss_chunks=1 if is_split and pins.loss_chunks is None else layout.loss_chunks,
            activation_checkpointing="none" if is_split else layout.activation_checkpointing,
            checkpoint_blocks="all" if is_split else layout.checkpoint_blocks,
        )


def alone_as_fsdp(layout: Layout) -> Layout:
    """A bare copy as FSDP over one rank, which casts a unit at once and frees what it has cast, but
    in a pipeline."""
    kept: Reshard = "never" if layout.pp > 1 else layout.reshard_after_forward
    return replace(layout, sharding="fsdp", reshard_after_forward=kept)


def sparing(asked: Question, layout: Layout) -> Iterator[Layout]:
    """`layout` with rare settings that need less memory than the usual ones; legal or not.

    All blocks are recomputed, and the loss is in the most pieces. A pipeline has blocks moved from
    the ranks that hold most, or the most stages: fewer blocks stay gathered then, and gradients of
    a stage whose micro-batches come one after another do not wait for those of the others. One rank
    alone is FSDP, which frees what it has cast.
    """
    pins = asked.pins
    if pins.activation_checkpointing is None and pins.checkpoint_blocks is None:
        layout = replace(layout, activation_checkpointing=asked.modes[-1])
    counts = piece_counts(layout, training=asked.training, pins=pins)
    cut = replace(layout, loss_chunks=counts[-1]) if counts else layout
    if layout.pp == 1:
        yield cut
        if pins.sharding is None and layout.sharding == "ddp" and layout.data_parallel == 1:
            yield alone_as_fsdp(cut)
        return
    if pins.stage_blocks is None:
        yield from (replace(cut, stage_blocks=blocks) for blocks in stage_splits(asked.case(cut)))
    stages = most_stages(asked.model.layers) // layout.pp
    if stages > 1 and pins.schedule is None:
        yield _with_stages(replace(cut, schedule="interleaved_1f1b"), stages)
        # with many losses waiting, pieces of each would need more
        yield _with_stages(replace(layout, schedule="looped_bfs"), stages)


def _with_stages(layout: Layout, number: int) -> Layout:
    """`layout` with so many stages a rank: more than torch keeps gathered are not resharded."""
    some = replace(layout, virtual_stages=number)
    if not (some.reshards_stages and number > ACTIVE_STAGES):
        return some
    return replace(some, reshard_after_forward="never")
