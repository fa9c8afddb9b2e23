"""Passes: the time of all micro-batches on one rank, and what it waits for, without a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.kernels.head import ends_seconds
from fsdpplan.cost.model.shards import (
    BlockUnit,
    Stage,
    block_cases,
    gradient_syncs,
    unit_cases,
)
from fsdpplan.cost.play.clocks import Played, played
from fsdpplan.cost.read.exposed import ExposedSeconds
from fsdpplan.cost.step.fsdp import (
    NO_SECONDS,
    MicroBatch,
    UnitSeconds,
    early_micro_batch,
    fsdp_step,
    with_seconds,
)
from fsdpplan.cost.step.replica import ReplicaBatch, replica_step
from fsdpplan.cost.traffic.block_times import block_times
from fsdpplan.cost.traffic.fsdp import fsdp_units
from fsdpplan.cost.traffic.replica import bucket_seconds
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.values import replace


def _computed_seconds(case: Case, unit: BlockUnit) -> UnitSeconds:
    """What a unit's blocks compute, and wait for inside: those that recompute and those that
    keep."""
    forward = backward = 0.0
    for own, blocks in unit_cases(case, unit):
        block = block_times(own)
        forward += blocks * block.forward_seconds
        backward += blocks * block.backward_seconds
    return UnitSeconds(forward=forward, backward=backward)


def fsdp_micro_batch(case: Case, stage: Stage) -> MicroBatch:
    """One micro-batch that reduces everything, for the stream simulation."""
    moved = fsdp_units(case, stage)
    tables = head = NO_SECONDS
    root = moved.root.seconds
    if not (moved.tables.is_there or moved.head.is_there):
        root = root.plus(_end_seconds(case, stage))
    else:
        tables = moved.tables.seconds.plus(_end_seconds(case, replace(stage, has_head=False)))
        head = moved.head.seconds.plus(_end_seconds(case, replace(stage, has_embedding=False)))
    return MicroBatch(
        runs=tuple(
            (unit.seconds.plus(_computed_seconds(case, of)), of.number) for of, unit in moved.blocks
        ),
        tables=tables,
        head=head,
        root=root,
        links_shared=moved.links_shared,
        is_flat=case.training.traits.flat_parameters,
    )


def _end_seconds(case: Case, stage: Stage) -> UnitSeconds:
    """What embedding, head and loss of a stage compute."""
    forward, backward = ends_seconds(case, stage)
    return UnitSeconds(forward=forward, backward=backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """All forward and backward passes of a step on one rank."""

    busy_seconds: float
    """The compute stream's work, with what the collectives inside blocks expose."""
    exposed: ExposedSeconds
    """What data parallelism and pipeline messages add."""
    bubble_seconds: float = 0.0
    host_seconds: float = 0.0
    """What copies from and to the host and its additions add to all of that."""
    hidden_exchange_seconds: float = 0.0
    """What blocks alone would expose of exchanges among experts, and passes side by side do not."""
    pp_rank: int = 0
    """The rank that this is about: the busiest."""


def plain_seconds(case: Case, stage: Stage) -> tuple[float, float]:
    """(forward, backward) of one micro-batch on one rank, data-parallel collectives apart."""
    forward, backward = ends_seconds(case, stage)
    for own, blocks in block_cases(case, stage):
        block = block_times(own)
        forward += blocks * block.forward_seconds
        backward += blocks * block.backward_seconds
    return forward, backward


def fsdp_passes(case: Case, stage: Stage) -> Passes:
    """All micro-batches under FSDP, by its streams."""
    layout = case.layout
    batch = fsdp_micro_batch(case, stage)
    on_device = batch
    if layout.offload == "cpu":
        on_device = with_seconds(batch, upload=0.0, download=0.0, adding=0.0)
    step = played_step(early_micro_batch(on_device, layout), on_device, layout.num_microbatches)
    return Passes(
        host_seconds=max(0.0, _offloaded(batch, layout).seconds - step.seconds)
        if layout.offload == "cpu"
        else 0.0,
        busy_seconds=step.seconds - step.exposed,
        exposed=ExposedSeconds(
            all_gather=step.waited["all_gather"],
            reduce_scatter=step.waited["reduce_scatter"],
            all_reduce=step.waited["all_reduce"],
        ),
    )


@lru_cache(maxsize=8192)
def played_step(
    early: MicroBatch, last: MicroBatch, num_microbatches: int, first: MicroBatch | None = None
) -> Played:
    """A step's micro-batches played, as `fsdp_step` puts them together."""
    return played(fsdp_step(early=early, last=last, num_microbatches=num_microbatches, first=first))


def _offloaded(batch: MicroBatch, layout: Layout) -> Played:
    """The streams with what goes from and to the host: the first gradients of a step are copied
    there beside the passes, later ones are waited for and added."""
    copied = with_seconds(batch, adding=0.0)
    if not host_additions(layout):
        return played_step(early_micro_batch(copied, layout), copied, layout.num_microbatches)
    added = with_seconds(batch, download=0.0)
    return played_step(added, added, layout.num_microbatches, copied)


def host_additions(layout: Layout) -> int:
    """Micro-batches of a step whose gradients the host adds to earlier ones."""
    if layout.offload != "cpu" or gradient_syncs(layout) == 1:
        return 0
    is_partial = layout.gradient_sync == "reduce_scatter_only" and layout.dp_replicate > 1
    return 0 if is_partial else layout.num_microbatches - 1


def replica_passes(case: Case, stage: Stage) -> Passes:
    """All micro-batches under DDP, ZeRO-1 or ZeRO-2, or on one rank."""
    layout = case.layout
    reduces_all = gradient_syncs(layout) == layout.num_microbatches
    batch = replica_batch(case, stage, plain_seconds(case, stage))
    step = played(
        replica_step(batch, num_microbatches=layout.num_microbatches, reduces_all=reduces_all)
    )
    share, reduced = batch.scatter_share, step.waited["reduction"]
    return Passes(
        busy_seconds=step.seconds - step.exposed,
        exposed=ExposedSeconds(
            all_gather=step.waited["all_gather"],
            reduce_scatter=share * reduced,
            all_reduce=(1 - share) * reduced,
        ),
    )


def replica_batch(case: Case, stage: Stage, seconds: tuple[float, float]) -> ReplicaBatch:
    """One micro-batch of `seconds`, (forward, backward), with all that it may gather and reduce."""
    training = case.training
    forward, backward = seconds
    return ReplicaBatch(
        forward=forward,
        backward=backward,
        buckets=bucket_seconds(case, stage),
        # PowerSGD's hook waits for the device at the end of each bucket, and backward with it
        overlaps_reduction=training.traits.overlaps_reduction and not training.powersgd_rank,
        overlaps_gather=training.traits.overlaps_parameter_gather,
    )
