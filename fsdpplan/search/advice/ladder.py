"""Ladder: layouts of the same ranks and global batch that need less memory than a failed one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.memory.peak import available_bytes, rank_memory
from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.legality import in_pieces, legal_layout_problem
from fsdpplan.spec.layout import (
    ActivationCheckpointing,
    CheckpointBlocks,
    GradientSync,
    Layout,
)
from fsdpplan.spec.plan import Estimate, Plan

LEAST_SAVED_FRACTION = 0.05
"""Of the failed layout's memory: less would hardly be another attempt."""
MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")
"""From the one that keeps most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A leaner layout, priced."""

    layout: Layout
    estimate: Estimate
    words: str
    """What is different from the layout that failed."""


def leaner_layouts(plan: Plan, *, needed_bytes: int | None) -> tuple[Rung, ...]:
    """Legal layouts that save memory by recomputation, resharding, a loss in pieces, smaller
    micro-batches or deeper sharding, alone or together; the fastest first.

    `needed_bytes` is what tensors needed at the failure; where that is more than predicted, all
    predictions count as too low by the same factor.
    """
    failed = plan.estimate.memory
    factor = max(1.0, (needed_bytes or 0) / failed.peak_allocated_bytes)
    most = min(
        available_bytes(cluster=plan.cluster, training=plan.training) / factor,
        failed.peak_device_bytes * (1 - LEAST_SAVED_FRACTION),
    )
    rungs = [_rung(plan, layout) for layout in _leaner(plan) if _needed(plan, layout) <= most]
    runnable = [rung for rung in rungs if rung.estimate.runnable]
    return tuple(sorted(runnable, key=lambda rung: rung.estimate.step_seconds.expected))


def _leaner(plan: Plan) -> Iterator[Layout]:
    """Every combination of the changes that is legal, but for none of them."""
    asked = plan.layout
    for spread, micro_batch, (mode, blocks) in product(
        _spreads(asked), _micro_batches(asked), _modes(asked)
    ):
        smaller = replace(
            spread,
            micro_batch=micro_batch,
            num_microbatches=asked.micro_batch * asked.num_microbatches // micro_batch,
            activation_checkpointing=mode,
            checkpoint_blocks=blocks,
        )
        pieces = in_pieces(smaller, training=plan.training, pins=Pins())
        for layout in (smaller, *([] if pieces is None else [pieces])):
            if layout != asked and _is_legal(plan, layout):
                yield layout


def _spreads(layout: Layout) -> Iterator[Layout]:
    """As it is, freed after forward, and sharded over all replicas."""
    yield layout
    sync: GradientSync = "last" if layout.pp > 1 else "every"
    always = replace(layout, reshard_after_forward="always", gradient_sync=sync)
    if layout.sharding == "fsdp" and always != layout:
        yield always
    if layout.dp_replicate > 1:
        ranks = layout.data_parallel
        yield replace(always, sharding="fsdp", dp_replicate=1, dp_shard=ranks)


def _micro_batches(layout: Layout) -> Iterator[int]:
    """As it is, and halves as long as they are whole."""
    size = layout.micro_batch
    yield size
    while size % 2 == 0:
        size //= 2
        yield size


def _modes(layout: Layout) -> Iterator[tuple[ActivationCheckpointing, CheckpointBlocks]]:
    """What is recomputed, and in which blocks: as it is, then in all, then more of each."""
    if layout.checkpoint_blocks != "all":
        yield layout.activation_checkpointing, layout.checkpoint_blocks
    for mode in MODES[MODES.index(layout.activation_checkpointing) :]:
        yield mode, "all"


def _is_legal(plan: Plan, layout: Layout) -> bool:
    return legal_layout_problem(replace(plan.case, layout=layout)) is None


def _needed(plan: Plan, layout: Layout) -> int:
    return rank_memory(replace(plan.case, layout=layout)).peak_device_bytes


def _rung(plan: Plan, layout: Layout) -> Rung:
    priced = estimate(replace(plan.case, layout=layout))
    return Rung(layout=layout, estimate=priced, words=changed_words(plan.layout, layout))


def changed_words(failed: Layout, leaner: Layout) -> str:
    """What is different, as options of `recommend`."""
    flags = {
        "sharding": "--sharding",
        "dp_replicate": "--dp-replicate",
        "dp_shard": "--dp-shard",
        "reshard_after_forward": "--reshard-after-forward",
        "gradient_sync": "--gradient-sync",
        "micro_batch": "--micro-batch",
        "activation_checkpointing": "--activation-checkpointing",
        "checkpoint_blocks": "--checkpoint-blocks",
        "loss_chunks": "--loss-chunks",
    }
    return " ".join(
        f"{flag} {getattr(leaner, name)}"
        for name, flag in flags.items()
        if getattr(leaner, name) != getattr(failed, name)
    )
