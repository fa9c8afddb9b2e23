"""Overlap: FSDP2's streams simulated unit by unit; what stays exposed falls out.

Two clocks run: the compute stream and the communicator of the shard group, on which all-gathers
and reduce-scatters queue in the order in which they are issued, also from different streams (NCCL
runs one collective of a communicator at a time). HSDP's all-reduces have a third clock of their
own, unless they share the shard group's links.

* Forward: the host runs ahead, so unit i + 1 is gathered while unit i computes; two flat buffers
  are in use, so the gather of i + 2 waits for the copy-out of i.
* Backward: the gather of unit i - 1 is issued after the copy-out of i; the reduce-scatter of i
  after its computation; the compute stream waits for the reduce-scatter of i + 1 before it fills
  the next input buffer.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`,
`_fsdp_collectives.py`). Left out: the cast of the own shard before a gather (1/n of it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Seconds of one FSDP unit in one micro-batch."""

    forward: float
    backward: float
    """Recomputation included."""
    gather: float
    regather: float
    """Gather in backward; 0 when forward's copy is kept."""
    reduce_scatter: float
    """0 in a micro-batch that does not reduce."""
    all_reduce: float
    copy_out: float
    """From the flat buffer into parameters, on the compute stream."""
    copy_in: float
    """From gradients into the reduce-scatter input, on the compute stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward through all units."""

    units: int
    unit: UnitSeconds
    root: UnitSeconds
    """Its `forward` is the head with the loss, its `backward` theirs; the embedding is free."""
    links_shared: bool
    """All-reduces use the same links as the shard group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Clocks at the end of a micro-batch, and what the compute stream has waited for."""

    compute: float = 0.0
    shard: float = 0.0
    replicate: float = 0.0
    gather_exposed: float = 0.0
    reduce_scatter_exposed: float = 0.0
    all_reduce_exposed: float = 0.0

    @property
    def exposed(self) -> float:
        """All waiting."""
        return self.gather_exposed + self.reduce_scatter_exposed + self.all_reduce_exposed


def run_micro_batch(batch: MicroBatch, start: Timeline) -> Timeline:
    """The clocks after one micro-batch that begins at `start`."""
    unit, root, units = batch.unit, batch.root, batch.units
    compute, shard, replicate = start.compute, start.shard, start.replicate
    gather_wait = scatter_wait = 0.0

    # forward: the root (embedding, head) first, then each unit
    shard = max(shard, compute) + root.gather  # FSDP2 waits for the optimizer here
    gather_wait += max(0.0, shard - compute)
    compute = max(compute, shard) + root.copy_out
    copied_before, copied = compute, compute
    for _ in range(units):
        shard = max(shard, copied_before) + unit.gather
        if shard > compute:
            gather_wait += shard - compute
            compute = shard
        copied_before, copied = copied, compute + unit.copy_out
        compute = copied + unit.forward
    compute += root.forward

    # backward: the last unit's gather runs beside the head's backward
    regathered = shard = max(shard, compute) + unit.regather if unit.regather else 0.0
    compute += root.backward
    reduced = 0.0
    for index in range(units - 1, -1, -1):
        if unit.regather:
            if regathered > compute:
                gather_wait += regathered - compute
                compute = regathered
            compute += unit.copy_out
            if index:
                regathered = shard = max(shard, compute) + unit.regather
        compute += unit.backward
        if unit.reduce_scatter:
            if reduced > compute:
                scatter_wait += reduced - compute
                compute = reduced
            compute += unit.copy_in
            shard, replicate = _reduce(batch, unit, compute, shard, replicate)
            reduced = shard
    if root.reduce_scatter:
        scatter_wait += max(0.0, reduced - compute)
        compute = max(compute, reduced) + root.copy_in
        shard, replicate = _reduce(batch, root, compute, shard, replicate)
    return Timeline(
        compute=compute,
        shard=shard,
        replicate=replicate,
        gather_exposed=start.gather_exposed + gather_wait,
        reduce_scatter_exposed=start.reduce_scatter_exposed + scatter_wait,
        all_reduce_exposed=start.all_reduce_exposed,
    )


def _reduce(
    batch: MicroBatch, unit: UnitSeconds, compute: float, shard: float, replicate: float
) -> tuple[float, float]:
    """Queue a reduce-scatter and its all-reduce; the new clocks of the two communicators."""
    shard = max(shard, compute) + unit.reduce_scatter
    if unit.all_reduce:
        replicate = max(shard, replicate) + unit.all_reduce
        if batch.links_shared:
            shard = replicate
    return shard, replicate


def finish(timeline: Timeline) -> Timeline:
    """The optimizer waits for every reduction of the last micro-batch."""
    scatter_wait = max(0.0, timeline.shard - timeline.compute)
    compute = max(timeline.compute, timeline.shard)
    reduce_wait = max(0.0, timeline.replicate - compute)
    return replace(
        timeline,
        compute=compute + reduce_wait,
        reduce_scatter_exposed=timeline.reduce_scatter_exposed + scatter_wait,
        all_reduce_exposed=timeline.all_reduce_exposed + reduce_wait,
    )


@lru_cache(maxsize=8192)
def fsdp_timeline(*, early: MicroBatch, last: MicroBatch, num_microbatches: int) -> Timeline:
    """All micro-batches of a step; `early` describes all but the last.

    Of many equal micro-batches two are simulated and the second one repeated.
    """
    timeline = Timeline()
    simulated = min(2, num_microbatches - 1)
    previous = timeline
    for _ in range(simulated):
        previous, timeline = timeline, run_micro_batch(early, timeline)
    timeline = _repeat(previous, timeline, num_microbatches - 1 - simulated)
    return finish(run_micro_batch(last, timeline))


def _repeat(before: Timeline, after: Timeline, times: int) -> Timeline:
    """`after`, advanced `times` times by what lies between it and `before`."""
    if not times:
        return after
    return Timeline(
        compute=after.compute + times * (after.compute - before.compute),
        shard=after.shard + times * (after.compute - before.compute),
        # nothing waits for these before the last micro-batch: slow ones pile up
        replicate=after.replicate + times * (after.replicate - before.replicate),
        gather_exposed=after.gather_exposed
        + times * (after.gather_exposed - before.gather_exposed),
        reduce_scatter_exposed=after.reduce_scatter_exposed
        + times * (after.reduce_scatter_exposed - before.reduce_scatter_exposed),
        all_reduce_exposed=after.all_reduce_exposed,
    )


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
