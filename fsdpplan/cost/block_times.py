"""Block times: what one block takes in a micro-batch, computed once for all layouts whose blocks do
the same.

A search prices thousands of layouts, and their blocks do a few dozen things: how gradients are
reduced, how often, over how many ranks, decides nothing of what is inside a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from fsdpplan.cost.block_calls import block_calls
from fsdpplan.cost.block_exposed import BlockWaiting, calls_waiting
from fsdpplan.cost.calls import BlockCall
from fsdpplan.cost.compute import BlockSeconds, block_seconds
from fsdpplan.cost.timing import block_work
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


@dataclass(frozen=True, slots=True)
class BlockWays:
    """A layout as far as its blocks are concerned: equal to every one whose blocks do the same."""

    decides: tuple[object, ...]
    """All that is read of it."""
    layout: Layout = field(compare=False)
    """One of them."""


def _inner_ways(training: Training, layout: Layout) -> tuple[object, ...]:
    """What decides the collectives inside a block, and what they run beside."""
    return (
        layout.tp,
        layout.cp,
        layout.ep,
        layout.micro_batch,
        layout.activation_checkpointing,
        layout.sequence_parallel,
        layout.async_tp,
        layout.compile,
        # one fp8 cast of a weight serves all of them
        layout.num_microbatches if training.fp8_recipe == "delayed" else 0,
    )


def _block_ways(training: Training, layout: Layout) -> tuple[object, ...]:
    """What decides all that a block does: with what data parallelism puts around it."""
    is_fsdp = layout.sharding == "fsdp"
    around = layout.wrap_blocks if is_fsdp else layout.data_parallel > 1
    return (is_fsdp, around, *_inner_ways(training, layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """One block and micro-batch on one rank."""

    seconds: BlockSeconds
    """What it computes."""
    waiting: BlockWaiting
    """What its collectives add."""
    calls: tuple[BlockCall, ...]
    """Those."""
    forward: float
    """Both."""
    backward: float
    """Both, recomputation included."""


def block_times(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> BlockTimes:
    """Of one block as `layout` has it; with experts, of one that has them."""
    ways = BlockWays(_block_ways(training, layout), layout)
    return _block_times(model, cluster, training, ways)


@lru_cache(maxsize=16384)
def _block_times(
    model: Model, cluster: Cluster, training: Training, ways: BlockWays
) -> BlockTimes:
    work = block_work(model=model, training=training, layout=ways.layout)
    seconds = block_seconds(work, cluster.device)
    inner = BlockWays(_inner_ways(training, ways.layout), ways.layout)
    calls, waiting = _inner_waiting(model, cluster, training, inner)
    return BlockTimes(
        seconds=seconds,
        waiting=waiting,
        calls=calls,
        forward=seconds.forward + waiting.forward,
        backward=seconds.recompute + seconds.backward + waiting.backward,
    )


@lru_cache(maxsize=16384)
def _inner_waiting(
    model: Model, cluster: Cluster, training: Training, ways: BlockWays
) -> tuple[tuple[BlockCall, ...], BlockWaiting]:
    given = {"model": model, "training": training, "layout": ways.layout}
    calls = block_calls(device_kind=cluster.device.kind, **given)  # type: ignore[arg-type]
    work = block_work(**given)  # type: ignore[arg-type]
    return calls, calls_waiting(calls, work=work, cluster=cluster)
