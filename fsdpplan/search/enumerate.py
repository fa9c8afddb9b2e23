"""Enumerate: a generator for each axis of the search; every divisor, not only powers of two."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

from fsdpplan.cost.schedule.actions import ACTIVE_STAGES
from fsdpplan.cost.schedule.order import microbatches_refusal
from fsdpplan.search.pins import Pins, attention_over_cp
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.conventions import V_SCHEDULES
from fsdpplan.spec.layout import (
    DDP_BUCKET_BYTES,
    ActivationCheckpointing,
    GradientSync,
    Layout,
    Offload,
    Reshard,
    Schedule,
    Sharding,
)
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

LOOPED_SCHEDULES: tuple[Schedule, ...] = (
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
)
"""Schedules with any number of stages a rank, from two on."""

USUAL_SCHEDULES: tuple[Schedule | None, ...] = (None, "none", "1f1b", "interleaved_1f1b")
"""Pins of a schedule with which no other is tried but these."""


class Degrees(NamedTuple):
    """How the ranks are spread: the part of a layout that decides its traffic."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    sharding: Sharding
    offload: Offload = "none"
    experts_over_tp: bool = False

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


def context_ranks(*, cluster: Cluster, training: Training, pins: Pins) -> tuple[int, ...]:
    """Degrees of context parallelism that cut a sequence into two pieces a rank."""
    if pins.cp is not None:
        return (pins.cp,)
    splits = divisors(cluster.gpus)
    return (1, *(cp for cp in splits[1:] if training.seq_len % (2 * cp) == 0))


def expert_ranks(*, model: Model, shard_ranks: int, pins: Pins) -> tuple[int, ...]:
    """Degrees of expert parallelism: what divides the experts and the shard group."""
    if pins.ep is not None:
        return (pins.ep,) if shard_ranks % pins.ep == 0 else ()
    return divisors(gcd(model.experts.experts, shard_ranks)) if model.experts else (1,)


def degrees(*, model: Model, cluster: Cluster, training: Training, pins: Pins) -> Iterator[Degrees]:
    """Every way to spread the ranks that the pins allow."""
    contexts = context_ranks(cluster=cluster, training=training, pins=pins)
    for tp in _choices(pins.tp, divisors(cluster.gpus)):
        spreads = _spreads(tp, model, training, pins)
        for pp in _choices(pins.pp, divisors(cluster.gpus)):
            for cp in contexts:
                rest, left = divmod(cluster.gpus, tp * pp * cp)
                if left or not rest:
                    continue
                for dp_shard in _choices(pins.dp_shard, divisors(rest)):
                    dp_replicate, left = divmod(rest, dp_shard)
                    if left or dp_replicate != (pins.dp_replicate or dp_replicate):
                        continue
                    eps = expert_ranks(model=model, shard_ranks=dp_shard * cp, pins=pins)
                    held = _held(dp_shard * cp, dp_replicate, cluster, training, pins)
                    for (sharding, offload), ep, over_tp in product(held, eps, spreads):
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
                            offload=offload,
                            experts_over_tp=over_tp,
                        )


def _spreads(tp: int, model: Model, training: Training, pins: Pins) -> tuple[bool, ...]:
    """Whether tensor-parallel ranks have whole experts each."""
    if pins.experts_over_tp is not None:
        return (pins.experts_over_tp,)
    can = training.traits.spreads_experts and model.experts is not None and tp > 1
    return (False, True) if can else (False,)


def _held(
    shard_ranks: int, copies: int, cluster: Cluster, training: Training, pins: Pins
) -> list[tuple[Sharding, Offload]]:
    """(sharding, offload) of the state over so many ranks, of which there are `copies` groups."""
    shardings = _shardings(shard_ranks, training, pins)
    held = [(sharding, pins.offload or "none") for sharding in shardings]
    # one rank alone shards nothing, and is still what keeps its state on the host
    shards = pins.sharding in (None, "fsdp") and (shard_ranks > 1 or copies == 1)
    if pins.offload is None and shards and offloads(cluster, training):
        held.append(("fsdp", "cpu"))
    return held


def offloads(cluster: Cluster, training: Training) -> bool:
    """Whether FSDP2 may keep state on the host: there is a device apart from it, and an optimizer
    that runs there."""
    has_device, runtime = cluster.device.kind != "cpu", training.runtime
    return has_device and runtime == "fsdp2" and training.optimizer == "adamw"


def _shardings(shard_ranks: int, training: Training, pins: Pins) -> tuple[Sharding, ...]:
    """What the software that trains can split over so many ranks."""
    if pins.sharding is not None:
        return (pins.sharding,)
    if shard_ranks == 1:
        return ("fsdp",) if pins.offload == "cpu" else ("ddp",)
    return ("zero1", "zero2", "fsdp") if training.traits.splits_optimizer else ("fsdp",)


def micro_batches(*, training: Training, data_parallel: int, pins: Pins) -> tuple[int, ...]:
    """Micro-batches that fill a rank's share of the global batch, smallest first."""
    if pins.micro_batch is not None:
        return (pins.micro_batch,)
    return divisors(training.global_batch // data_parallel)


def reshard_policies(
    *, d: Degrees, cluster: Cluster, pins: Pins, reshards_stages: bool = False
) -> tuple[Reshard, ...]:
    """always, back to the domain of a fast level when the shard group leaves it, and never.

    In the order of growing memory. `reshards_stages`: the software frees a pipeline's stages, too.
    """
    if pins.reshard_after_forward is not None:
        return (pins.reshard_after_forward,)
    if d.sharding != "fsdp":
        return ("always",)
    if d.pp > 1:
        return ("always", "never") if reshards_stages else ("never",)
    shard_ranks = d.dp_shard * d.cp
    inside = {level.domain_gpus // d.tp for level in cluster.levels[:-1]}
    smaller = sorted(
        (n for n in inside if 1 < n < shard_ranks and not shard_ranks % n), reverse=True
    )
    return ("always", *(smaller if d.ep == d.tp == 1 else ()), "never")


def sync_policies(*, d: Degrees, num_microbatches: int, pins: Pins) -> tuple[GradientSync, ...]:
    """Policies that differ, by growing memory: all are the same with one micro-batch."""
    if pins.gradient_sync is not None:
        return (pins.gradient_sync,)
    if d.pp > 1:
        return ("last",)
    if num_microbatches == 1:
        return ("every",)
    if d.sharding == "ddp":
        return ("last",)
    if d.sharding == "zero1":
        return ("last",)
    if d.dp_replicate > 1:
        return ("every", "reduce_scatter_only", "last")
    return ("every", "last")


def schedules(
    *, d: Degrees, model: Model, num_microbatches: int, pins: Pins
) -> Iterator[tuple[Schedule, int]]:
    """(schedule, virtual stages). GPipe has 1F1B's bubble and more memory: only when pinned.

    Zero-bubble schedules too are only taken when pinned: few programs can run them. More stages
    a rank than torch keeps gathered are too: it would gather them again and again.
    """
    if d.pp == 1:
        if pins.schedule in (None, "none"):
            yield "none", pins.virtual_stages or 1
        return
    offered: tuple[Schedule, ...] = ("1f1b", "interleaved_1f1b")
    for schedule in (pins.schedule,) if pins.schedule else offered:
        refusal = microbatches_refusal(
            schedule=schedule, pp=d.pp, num_microbatches=num_microbatches
        )
        if pins.virtual_stages:
            yield schedule, pins.virtual_stages
        elif schedule in V_SCHEDULES:
            yield schedule, 2
        elif schedule not in LOOPED_SCHEDULES:
            yield schedule, 1
        elif not refusal:
            tried = (2, ACTIVE_STAGES)
            yield from ((schedule, v) for v in tried if d.pp * v <= model.layers)


def layout_of(
    d: Degrees,
    *,
    micro_batch: int,
    num_microbatches: int,
    reshard: Reshard,
    sync: GradientSync,
    schedule: Schedule,
    virtual_stages: int,
    compiled: bool,
    pins: Pins,
    model: Model,
    training: Training,
) -> Layout:
    """The layout of one leaf of the search: with the least recomputation, with default buckets."""
    return Layout(
        dp_replicate=d.dp_replicate,
        dp_shard=d.dp_shard,
        cp=d.cp,
        tp=d.tp,
        pp=d.pp,
        ep=d.ep,
        experts_over_tp=d.experts_over_tp,
        sharding=d.sharding,
        reshard_after_forward=reshard,
        gradient_sync=sync,
        wrap_blocks=pins.wrap_blocks or 1,
        ddp_bucket_bytes=pins.ddp_bucket_bytes or DDP_BUCKET_BYTES,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_parallel=d.tp > 1,
        loss_parallel=d.tp > 1,
        async_tp=pins.async_tp or False,
        stage_blocks=pins.stage_blocks or (),
        activation_checkpointing=_least_mode(pins),
        checkpoint_blocks=pins.checkpoint_blocks or "all",
        offload=d.offload,
        compile=compiled,
        loss_chunks=pins.loss_chunks or 1,
        cp_attention=attention_over_cp(model=model, training=training, tp=d.tp, cp=d.cp, pins=pins),
    )


def _least_mode(pins: Pins) -> ActivationCheckpointing:
    """The least that backward recomputes: nothing, unless some blocks have to."""
    if pins.checkpoint_blocks in (None, "all"):
        return "none"
    return pins.activation_checkpointing or "op"
