"""Replica: one micro-batch of DDP, ZeRO-1 or ZeRO-2 as a program, or of one rank alone.

* Backward fills buckets one after another; a bucket is reduced when it is full, on a communicator
  that takes one at a time, and the pass ends when all are reduced. What of the pass fills a bucket
  is taken as proportional to its bytes.
* ZeRO-1 and ZeRO-2 gather updated parameters from the start of a step on, bucket by bucket in the
  order in which forward needs them; the part of the first forward pass that needs a bucket waits.
* Without overlap all gathers are before the pass, and all reductions behind it.

Source: torch 2.13's reducer launches its buckets in order; Megatron-LM
megatron/core/distributed/param_and_grad_buffer.py, `start_param_sync` of the next bucket in
`finish_param_sync` of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from fsdpplan.cost.step.program import Op, Program, Repeat, Run, Wait, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSeconds:
    """Collectives of one bucket."""

    share: float
    """Part of each pass that computes with its parameters."""
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0
    gather: float = 0.0
    """Of updated parameters; 0 under DDP."""

    @property
    def reduction(self) -> float:
        """All that reduces it."""
        return self.reduce_scatter + self.all_reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBatch:
    """One forward and backward pass of a rank that has whole parameters."""

    forward: float
    backward: float
    """Recomputation included."""
    buckets: tuple[BucketSeconds, ...] = ()
    """In the order in which backward fills them; none where nothing is reduced."""
    overlaps_reduction: bool = True
    overlaps_gather: bool = True

    @property
    def reduction(self) -> float:
        """All that reduces gradients."""
        return sum(bucket.reduction for bucket in self.buckets)

    @property
    def gather(self) -> float:
        """All that gathers updated parameters, beside or before the first one of a step."""
        return sum(bucket.gather for bucket in self.buckets)

    @property
    def scatter_share(self) -> float:
        """Part of the reductions' time that is reduce-scatters."""
        scatters = sum(bucket.reduce_scatter for bucket in self.buckets)
        return scatters / self.reduction if self.reduction else 0.0


def forward_pass(batch: ReplicaBatch, *, is_first: bool) -> tuple[Run, ...]:
    """Its first one waits for updated parameters."""
    whole = Op("forward", "compute", batch.forward)
    if not (is_first and batch.gather):
        return (Run((whole,)),)
    needed = (Wait("gather", "all_gather"),)

    def ops(bucket: BucketSeconds, at: int) -> Iterator[Op]:
        yield Op("gather", "shard", bucket.gather, (), at)
        if batch.overlaps_gather:
            yield Op("forward", "compute", bucket.share * batch.forward, needed, at)

    runs = _runs(batch.buckets[::-1], ops, first=len(batch.buckets) - 1, stride=-1)
    if batch.overlaps_gather:
        return tuple(runs)
    return (*runs, Run((whole._replace(after=needed),)))


def backward_pass(batch: ReplicaBatch, *, reduces: bool) -> tuple[Run, ...]:
    """One that reduces ends when all is reduced."""
    whole = Op("backward", "compute", batch.backward)
    if not (reduces and batch.buckets):
        return (Run((whole,)),)

    def ops(bucket: BucketSeconds, at: int) -> Iterator[Op]:
        if batch.overlaps_reduction:
            yield Op("backward", "compute", bucket.share * batch.backward, (), at)
        yield Op("reduce", "shard", bucket.reduction, (Wait("backward"),), at)

    runs = _runs(batch.buckets, ops, first=0, stride=1)
    if not batch.overlaps_reduction:
        runs = [Run((whole,)), *runs]
    return (*runs, Run((REDUCED,)))


REDUCED = Op("reduced", "compute", 0.0, (Wait("reduce", "reduction"),))
"""A backward pass is over when every bucket is reduced."""


def _runs(
    buckets: tuple[BucketSeconds, ...],
    ops: Callable[[BucketSeconds, int], Iterator[Op]],
    *,
    first: int,
    stride: int,
) -> list[Run]:
    """The operations of each bucket, equal ones in a row as one run; `first`: its number."""
    runs = []
    for bucket, alike in groupby(buckets):
        times = sum(1 for _ in alike)
        runs.append(Run(tuple(ops(bucket, first)), times, stride))
        first += times * stride
    return runs


def replica_step(batch: ReplicaBatch, *, num_microbatches: int, reduces_all: bool) -> Program:
    """All micro-batches of a step: each reduces its gradients, or the last alone does."""
    last = num_microbatches - 1
    program: Program = ()
    if last:
        program = micro_batch(batch, is_first=True, reduces=reduces_all)
    if last > 1:
        between = micro_batch(batch, is_first=False, reduces=reduces_all)
        program = (*program, Repeat(between, last - 1))
    return (*program, *micro_batch(batch, is_first=not last, reduces=True))


def micro_batch(batch: ReplicaBatch, *, is_first: bool, reduces: bool) -> tuple[Run, ...]:
    """Both passes of one."""
    passes = (*forward_pass(batch, is_first=is_first), *backward_pass(batch, reduces=reduces))
    return joined(passes)
