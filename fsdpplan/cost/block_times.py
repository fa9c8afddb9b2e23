"""Block times: what one block takes in a micro-batch, computed once for all layouts whose blocks do
the same.

A search prices thousands of layouts, and their blocks do a few dozen things: how gradients are
reduced, how often, over how many ranks, decides nothing of what is inside a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.block_calls import block_calls
from fsdpplan.cost.block_exposed import BlockWaiting, calls_waiting
from fsdpplan.cost.calls import BlockCall
from fsdpplan.cost.compute import BlockSeconds, block_seconds
from fsdpplan.cost.timing import block_work
from fsdpplan.cost.ways import Ways, block_ways, inner_ways
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


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
    """What it takes with both."""
    backward: float
    """The same, recomputation included."""

    @property
    def computed(self) -> float:
        """Of both passes, what it does not wait for."""
        return self.seconds.forward + self.seconds.recompute + self.seconds.backward


def block_times(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> BlockTimes:
    """Of one block as `layout` has it; with experts, of one that has them."""
    ways = Ways(block_ways(model, training, layout), layout)
    return _block_times(model, cluster, training, ways)


@lru_cache(maxsize=16384)
def _block_times(model: Model, cluster: Cluster, training: Training, ways: Ways) -> BlockTimes:
    work = block_work(model=model, training=training, layout=ways.layout)
    seconds = block_seconds(work, cluster.device)
    inner = Ways(inner_ways(model, training, ways.layout), ways.layout)
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
    model: Model, cluster: Cluster, training: Training, ways: Ways
) -> tuple[tuple[BlockCall, ...], BlockWaiting]:
    given = {"model": model, "training": training, "layout": ways.layout}
    calls = block_calls(device_kind=cluster.device.kind, **given)  # type: ignore[arg-type]
    work = block_work(**given)  # type: ignore[arg-type]
    return calls, calls_waiting(calls, work=work, cluster=cluster)
