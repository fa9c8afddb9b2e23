"""Block times: what one block takes in a micro-batch, computed once for all layouts whose blocks do
the same.

A search prices thousands of layouts, and their blocks do a few dozen things: how gradients are
reduced, how often, over how many ranks, decides nothing of what is inside a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.kernels.compute import block_seconds
from fsdpplan.cost.kernels.work import BlockSeconds
from fsdpplan.cost.model.ways import Ways, block_ways, inner_ways
from fsdpplan.cost.overlap.block_exposed import BlockWaiting, calls_waiting
from fsdpplan.cost.overlap.timing import block_work
from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.cost.traffic.calls import BlockCall
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """One block and micro-batch on one rank."""

    seconds: BlockSeconds
    """What it computes."""
    waiting: BlockWaiting
    """What its collectives add."""
    queued_seconds: tuple[float, float]
    """(forward, backward) what its collectives would add, did the device never wait for its host;
    those apart that the host waits for itself."""
    calls: tuple[BlockCall, ...]
    """Its collectives."""
    forward_seconds: float
    """What it takes with both."""
    backward_seconds: float
    """The same, recomputation included."""

    @property
    def computed_seconds(self) -> float:
        """Of both passes, what it does not wait for."""
        return (
            self.seconds.forward_seconds
            + self.seconds.recompute_seconds
            + self.seconds.backward_seconds
        )


def block_times(case: Case) -> BlockTimes:
    """Of one block of the case; with experts, of one that has them."""
    return _block_times(block_ways(case))


@lru_cache(maxsize=16384)
def _block_times(ways: Ways) -> BlockTimes:
    case = ways.case
    seconds = block_seconds(block_work(case), case.cluster.device)
    calls, alone = _inner_waiting(case.cluster, inner_ways(case))
    waiting = alone.beside_host(
        forward_spare=seconds.forward_seconds - seconds.forward_device_seconds,
        backward_spare=seconds.recompute_seconds
        - seconds.recompute_device_seconds
        + seconds.backward_seconds
        - seconds.backward_device_seconds,
    )
    return BlockTimes(
        seconds=seconds,
        waiting=waiting,
        queued_seconds=alone.queued_seconds,
        calls=calls,
        forward_seconds=seconds.forward_seconds + waiting.forward_seconds,
        backward_seconds=seconds.recompute_seconds
        + seconds.backward_seconds
        + waiting.backward_seconds,
    )


@lru_cache(maxsize=16384)
def _inner_waiting(cluster: Cluster, ways: Ways) -> tuple[tuple[BlockCall, ...], BlockWaiting]:
    calls = block_calls(ways.case)
    return calls, calls_waiting(calls, work=block_work(ways.case), cluster=cluster)
