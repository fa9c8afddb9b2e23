"""Enumerate: a generator for each axis of the search; every divisor, not only powers of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.search.pins import Pins
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import GradientSync, Layout, Reshard, Schedule, Sharding
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

MAX_MICRO_BATCH = 32
"""Larger micro-batches gain nothing that accumulation does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How the ranks are spread: the part of a layout that decides its traffic."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    sharding: Sharding

    @property
    def data_parallel(self) -> int:
        """Ranks over which the batch splits."""
        return self.dp_replicate * self.dp_shard


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def _choices(pinned: int | None, choices: tuple[int, ...]) -> tuple[int, ...]:
    return choices if pinned is None else (pinned,)


def degrees(*, cluster: Cluster, pins: Pins) -> Iterator[Degrees]:
    """Every way to spread the ranks that the pins allow."""
    cp, ep = pins.cp or 1, pins.ep or 1
    for tp in _choices(pins.tp, divisors(cluster.gpus)):
        for pp in _choices(pins.pp, divisors(cluster.gpus)):
            rest, left = divmod(cluster.gpus, tp * pp * cp)
            if left or not rest:
                continue
            for dp_shard in _choices(pins.dp_shard, divisors(rest)):
                dp_replicate, left = divmod(rest, dp_shard)
                if left or dp_replicate != (pins.dp_replicate or dp_replicate):
                    continue
                sharding = pins.sharding or ("ddp" if dp_shard * cp == 1 else "fsdp")
                if sharding == "ddp" and dp_shard > 1:
                    continue
                yield Degrees(
                    pp=pp,
                    dp_replicate=dp_replicate,
                    dp_shard=dp_shard,
                    cp=cp,
                    tp=tp,
                    ep=ep,
                    sharding=sharding,
                )


def micro_batches(*, training: Training, data_parallel: int, pins: Pins) -> tuple[int, ...]:
    """Micro-batches that fill a rank's share of the global batch, smallest first."""
    if pins.micro_batch is not None:
        return (pins.micro_batch,)
    per_rank = training.global_batch // data_parallel
    return tuple(d for d in divisors(per_rank) if d <= MAX_MICRO_BATCH)


def reshard_policies(*, d: Degrees, cluster: Cluster, pins: Pins) -> tuple[Reshard, ...]:
    """always, never, and back to the domain of a fast level when the shard group leaves it."""
    if pins.reshard_after_forward is not None:
        return (pins.reshard_after_forward,)
    if d.sharding == "ddp":
        return ("always",)
    if d.pp > 1:
        return ("never",)
    shard_ranks = d.dp_shard * d.cp
    inside = {level.domain_gpus // d.tp for level in cluster.levels[:-1]}
    smaller = sorted(n for n in inside if 1 < n < shard_ranks and shard_ranks % n == 0)
    return ("never", *smaller, "always")


def sync_policies(*, d: Degrees, num_microbatches: int, pins: Pins) -> tuple[GradientSync, ...]:
    """Policies that differ: all are the same with one micro-batch."""
    if pins.gradient_sync is not None:
        return (pins.gradient_sync,)
    if d.pp > 1:
        return ("last",)
    if num_microbatches == 1:
        return ("every",)
    if d.sharding == "ddp":
        return ("last",)
    if d.dp_replicate > 1:
        return ("last", "reduce_scatter_only", "every")
    return ("last", "every")


def schedules(
    *, d: Degrees, model: Model, num_microbatches: int, pins: Pins
) -> Iterator[tuple[Schedule, int]]:
    """(schedule, virtual stages). GPipe has 1F1B's bubble and more memory: only when pinned."""
    if d.pp == 1:
        if pins.schedule in (None, "none"):
            yield "none", pins.virtual_stages or 1
        return
    for schedule in (pins.schedule,) if pins.schedule else ("1f1b", "interleaved_1f1b"):
        if schedule != "interleaved_1f1b":
            yield schedule, pins.virtual_stages or 1
        elif pins.virtual_stages:
            yield schedule, pins.virtual_stages
        elif num_microbatches % d.pp == 0:
            yield from ((schedule, v) for v in (2, 4) if d.pp * v <= model.layers)


def layout_of(
    d: Degrees,
    *,
    micro_batch: int,
    num_microbatches: int,
    reshard: Reshard,
    sync: GradientSync,
    schedule: Schedule,
    virtual_stages: int,
    checkpointing: str,
    compiled: bool,
) -> Layout:
    """The layout of one leaf of the search."""
    return Layout(
        dp_replicate=d.dp_replicate,
        dp_shard=d.dp_shard,
        cp=d.cp,
        tp=d.tp,
        pp=d.pp,
        ep=d.ep,
        sharding=d.sharding,
        reshard_after_forward=reshard,
        gradient_sync=sync,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
        sequence_parallel=d.tp > 1,
        loss_parallel=d.tp > 1,
        compile=compiled,
    )
