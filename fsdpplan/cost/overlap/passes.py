"""Passes: the time of all micro-batches on one rank, and what it waits for, without a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdpplan.cost.model.shards import Stage, block_cases, gradient_syncs
from fsdpplan.cost.overlap.block_times import block_times
from fsdpplan.cost.overlap.exposed import (
    ExposedSeconds,
    bucket_seconds,
    gather_waiting_seconds,
    reduction_exposed_seconds,
)
from fsdpplan.cost.overlap.fsdp_timing import fsdp_micro_batch
from fsdpplan.cost.overlap.streams import MicroBatch, Timeline, fsdp_timeline
from fsdpplan.cost.overlap.timing import ends_seconds
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import Layout


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
    on_device = _with(batch, upload=0.0, download=0.0, adding=0.0)
    timeline = fsdp_timeline(
        early=_early(on_device, layout), last=on_device, num_microbatches=layout.num_microbatches
    )
    return Passes(
        host_seconds=max(0.0, _offloaded(batch, layout).compute - timeline.compute)
        if layout.offload == "cpu"
        else 0.0,
        busy_seconds=timeline.compute - timeline.exposed,
        exposed=ExposedSeconds(
            all_gather=timeline.gather_exposed,
            reduce_scatter=timeline.reduce_scatter_exposed,
            all_reduce=timeline.all_reduce_exposed,
        ),
    )


def _offloaded(batch: MicroBatch, layout: Layout) -> Timeline:
    """The streams with what goes from and to the host: the first gradients of a step are copied
    there beside the passes, later ones are waited for and added."""
    copied = _with(batch, adding=0.0)
    is_partial = layout.gradient_sync == "reduce_scatter_only" and layout.dp_replicate > 1
    if layout.gradient_sync == "last" or is_partial or layout.num_microbatches == 1:
        return fsdp_timeline(
            early=_early(copied, layout), last=copied, num_microbatches=layout.num_microbatches
        )
    added = _with(batch, download=0.0)
    return fsdp_timeline(
        first=copied, early=added, last=added, num_microbatches=layout.num_microbatches
    )


def _with(batch: MicroBatch, **seconds: float) -> MicroBatch:
    """The same with other `seconds` of every unit."""
    return replace(
        batch,
        runs=tuple((replace(unit, **seconds), number) for unit, number in batch.runs),
        tables=replace(batch.tables, **seconds),
        head=replace(batch.head, **seconds),
        root=replace(batch.root, **seconds),
    )


def _early(batch: MicroBatch, layout: Layout) -> MicroBatch:
    """A micro-batch before the last one, by the synchronisation policy."""
    match layout.gradient_sync:
        case "every":
            return batch
        case "reduce_scatter_only":
            # without replicas a reduction is whole as it is, and goes to the host
            silenced = {"all_reduce": 0.0, **(_NO_COPIES if layout.dp_replicate > 1 else {})}
        case "last":
            silenced = {"all_reduce": 0.0, "reduce_scatter": 0.0, "copy_in": 0.0, **_NO_COPIES}
    return _with(batch, **silenced)


_NO_COPIES = {"download": 0.0, "adding": 0.0}
"""Gradients that stay on the device."""


def replica_passes(case: Case, stage: Stage) -> Passes:
    """All micro-batches under DDP, ZeRO-1 or ZeRO-2, or on one rank."""
    training, layout = case.training, case.layout
    forward, backward = plain_seconds(case, stage)
    times = bucket_seconds(case, stage)
    once = reduction_exposed_seconds(times, training=training, backward_seconds=backward)
    reduced = gradient_syncs(layout) * once
    return Passes(
        busy_seconds=layout.num_microbatches * (forward + backward),
        exposed=ExposedSeconds(
            all_gather=gather_waiting_seconds(times, training=training, forward_seconds=forward),
            reduce_scatter=times.scatter_share * reduced,
            all_reduce=(1 - times.scatter_share) * reduced,
        ),
    )
