"""Replica timing: what reducing whole gradients and gathering updated parameters add to a step.

Gradients are reduced beside the backward pass that makes them, or after it; ZeRO-1 and ZeRO-2 then
gather the updated parameters, beside the next forward pass or before it. One communicator takes
its buckets one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.traffic.calls import group_seconds
from fsdpplan.cost.traffic.replicas import (
    buckets,
    is_reduced,
    parameter_moves,
    reductions,
    stage_tensors,
)
from fsdpplan.spec.case import Case
from fsdpplan.spec.training import Training


def ddp_exposed_seconds(
    *, bucket_seconds: tuple[float, ...], bucket_bytes: tuple[int, ...], backward_seconds: float
) -> float:
    """What DDP's all-reduces add after backward.

    A bucket is ready when backward has finished its parameters, taken as proportional to bytes;
    buckets are reduced one after another. Source: torch 2.13's reducer launches its buckets in
    order.
    """
    total_bytes = sum(bucket_bytes)
    done_bytes, clock = 0, 0.0
    for seconds, size in zip(bucket_seconds, bucket_bytes, strict=True):
        done_bytes += size
        ready = backward_seconds * done_bytes / total_bytes
        clock = max(clock, ready) + seconds
    return max(0.0, clock - backward_seconds)


def gather_exposed_seconds(
    *, bucket_seconds: tuple[float, ...], bucket_bytes: tuple[int, ...], forward_seconds: float
) -> float:
    """What gathering updated parameters adds to the forward pass that it runs beside.

    Buckets are gathered one after another from the start, in the order in which forward needs
    them; the part of forward that needs a bucket, taken as proportional to bytes, waits for it.
    Source: Megatron-LM megatron/core/distributed/param_and_grad_buffer.py, `start_param_sync` of
    the next bucket in `finish_param_sync` of each.
    """
    total_bytes = sum(bucket_bytes)
    gathered = clock = 0.0
    for seconds, size in zip(bucket_seconds, bucket_bytes, strict=True):
        gathered += seconds
        clock = max(clock, gathered) + forward_seconds * size / total_bytes
    return max(0.0, clock - forward_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSeconds:
    """Collectives of the buckets of one rank, in the order in which backward fills them."""

    fp32_bytes: tuple[int, ...] = ()
    reduce_scatters: tuple[float, ...] = ()
    all_reduces: tuple[float, ...] = ()
    gathers: tuple[float, ...] = ()
    """Of updated parameters; zeros under DDP."""

    @property
    def reductions(self) -> tuple[float, ...]:
        """All that reduces each bucket."""
        pairs = zip(self.reduce_scatters, self.all_reduces, strict=True)
        return tuple(scatter + reduce for scatter, reduce in pairs)

    @property
    def scatter_share(self) -> float:
        """Part of the reductions' time that is reduce-scatters."""
        total = sum(self.reductions)
        return sum(self.reduce_scatters) / total if total else 0.0


@lru_cache(maxsize=2048)
def bucket_seconds(case: Case, stage: Stage) -> BucketSeconds:
    """Seconds of each bucket's collectives; nothing on one rank and under FSDP."""
    cluster, training, layout = case.cluster, case.training, case.layout
    if not is_reduced(layout):
        return BucketSeconds()
    filled = buckets(case, stage)
    seconds = {bucket: {"reduce_scatter": 0.0, "all_reduce": 0.0} for bucket in filled}
    gathers = dict.fromkeys(filled, 0.0)
    whole = sum(bucket.fp32_bytes for bucket in filled)
    tensors = stage_tensors(model=case.model, stage=stage)
    for bucket, parts in seconds.items():
        for collective, group, size in reductions(bucket, training=training, layout=layout):
            parts[collective] += group_seconds(cluster, group, collective, size)
        if layout.sharding != "ddp":
            moves = parameter_moves(
                bucket, training=training, layout=layout, tensors=tensors, whole_bytes=whole
            )
            gathers[bucket] = moves.count * group_seconds(
                cluster, moves.group, moves.collective, moves.call_bytes
            )
    return BucketSeconds(
        fp32_bytes=tuple(bucket.fp32_bytes for bucket in filled),
        reduce_scatters=tuple(seconds[bucket]["reduce_scatter"] for bucket in filled),
        all_reduces=tuple(seconds[bucket]["all_reduce"] for bucket in filled),
        gathers=tuple(gathers[bucket] for bucket in filled),
    )


def reduction_exposed_seconds(
    times: BucketSeconds, *, training: Training, backward_seconds: float
) -> float:
    """What reducing the gradients of one backward pass adds to it."""
    if not times.fp32_bytes:
        return 0.0
    if not training.traits.overlaps_reduction:
        return sum(times.reductions)
    return ddp_exposed_seconds(
        bucket_seconds=times.reductions,
        bucket_bytes=times.fp32_bytes,
        backward_seconds=backward_seconds,
    )


def gather_waiting_seconds(
    times: BucketSeconds, *, training: Training, forward_seconds: float
) -> float:
    """What gathering the updated parameters adds to a step whose first forward takes so long."""
    if not times.fp32_bytes:
        return 0.0
    if not training.traits.overlaps_parameter_gather:
        return sum(times.gathers)
    return gather_exposed_seconds(
        bucket_seconds=times.gathers[::-1],
        bucket_bytes=times.fp32_bytes[::-1],
        forward_seconds=forward_seconds,
    )
