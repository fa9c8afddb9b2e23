"""Block times: what one block takes in a micro-batch with its collectives, computed once for all
layouts whose blocks do the same.

A search prices thousands of layouts, and their blocks do a few dozen things: how gradients are
reduced, how often, over how many ranks, decides nothing of what is inside a block.

A collective that runs beside a matmul hides behind it as far as that lasts; in chunks, one a rank,
the first chunk of one of the two runs alone:

    T = max(matmul in chunks, collective) + min(matmul in chunks, collective) / n

What is hidden still slows the matmul down (`slowdown_seconds`). Where a pass waits for its host,
the device has time to spare, and a collective hides in it, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.block.operator import Operator
from fsdpplan.cost.block.work import BlockWork, block_work
from fsdpplan.cost.kernels.attention import attention_backward_seconds, attention_forward_seconds
from fsdpplan.cost.kernels.compute import Kernel, block_kernels, block_seconds
from fsdpplan.cost.kernels.products import product_seconds
from fsdpplan.cost.kernels.rates import BlockSeconds
from fsdpplan.cost.model.formats import (
    Ways,
    block_ways,
    inner_ways,
)
from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.cost.traffic.calls import BlockCall, call_seconds
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.plan import Case

AxisSeconds = tuple[tuple[str, float], ...]
"""Seconds by mesh axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWaiting:
    """Exposed seconds of the collectives inside one block in one micro-batch."""

    forward_by_axis: AxisSeconds = ()
    backward_by_axis: AxisSeconds = ()
    """Recomputation included."""

    @property
    def forward_seconds(self) -> float:
        """Over all axes."""
        return sum(seconds for _, seconds in self.forward_by_axis)

    @property
    def backward_seconds(self) -> float:
        """Over all axes."""
        return sum(seconds for _, seconds in self.backward_by_axis)

    @property
    def queued_seconds(self) -> tuple[float, float]:
        """(forward, backward) without what the host waits for itself."""
        return _queued_seconds(self.forward_by_axis), _queued_seconds(self.backward_by_axis)

    @property
    def by_axis(self) -> AxisSeconds:
        """Of both passes; an axis may stand twice."""
        return self.forward_by_axis + self.backward_by_axis

    def beside_host(self, *, forward_spare: float, backward_spare: float) -> BlockWaiting:
        """What is left where the device waits for its host by so many seconds anyway.

        The host only queues a collective, and starts the next kernels meanwhile. An all-to-all
        among experts it must wait for itself: their tokens' numbers decide what it starts next.
        """
        return BlockWaiting(
            forward_by_axis=_less(self.forward_by_axis, forward_spare),
            backward_by_axis=_less(self.backward_by_axis, backward_spare),
        )


def calls_waiting(
    calls: tuple[BlockCall, ...], *, work: BlockWork, cluster: Cluster
) -> BlockWaiting:
    """What `calls` add to the block that does `work`."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for call in calls:
        axes, axis = forward if call.when == "forward" else backward, call.group.axis
        axes[axis] = axes.get(axis, 0.0) + exposed_seconds(call, work=work, cluster=cluster)
    return BlockWaiting(
        forward_by_axis=tuple(forward.items()), backward_by_axis=tuple(backward.items())
    )


def _queued_seconds(by_axis: AxisSeconds) -> float:
    return sum(seconds for axis, seconds in by_axis if axis != "ep")


def _less(by_axis: AxisSeconds, spare: float) -> AxisSeconds:
    """Without `spare` seconds of those that the host does not wait for, each axis its share."""
    queued = _queued_seconds(by_axis)
    if spare <= 0 or not queued:
        return by_axis
    left = max(0.0, 1 - spare / queued)
    return tuple((axis, seconds * (1 if axis == "ep" else left)) for axis, seconds in by_axis)


def exposed_seconds(call: BlockCall, *, work: BlockWork, cluster: Cluster) -> float:
    """Seconds by which the calls prolong the block."""
    total, device = call_seconds(call, cluster), cluster.device
    if call.overlap == "none":
        return total
    if call.overlap == "scores":
        beside = call.share * _scores_seconds(call, work, device)
        return max(0.0, total - beside)
    products = [
        one
        for one in block_kernels(work, device)
        if one.operator.place == call.place and _is_split(one.operator)
    ]
    if not products:
        return total
    if call.overlap == "chunks":
        return min(total, _chunked_seconds(products, total, call.group.ranks, work, device))
    # products of backward by weight are taken to be as large as forward's
    own = sum(one.by_input if call.overlap == "inputs" else one.forward for one in products)
    return max(0.0, total - own)


def _scores_seconds(call: BlockCall, work: BlockWork, device: Device) -> float:
    if call.when == "backward":
        return attention_backward_seconds(work, device)
    return attention_forward_seconds(work, device)


def _is_split(operator: Operator) -> bool:
    """Whether it is a product behind or before a tensor-parallel collective: of a network that
    every token visits, one that is split, and reads the block's input or makes its output."""
    if not operator.product:
        return False
    weight = operator.product.weight
    return weight.split != "none" and not (weight.reads_latents or "." in operator.name)


def _chunked_seconds(
    kernels: list[Kernel], collective: float, chunks: int, work: BlockWork, device: Device
) -> float:
    """What the collective adds to matmuls that are cut with it into `chunks` chunks of rows."""
    whole = chunk = 0.0
    for kernel in kernels:
        assert kernel.operator.product
        whole += kernel.forward
        part = replace(kernel.operator.product, rows=kernel.operator.product.rows / chunks)
        chunk += product_seconds(part, dtype=part.dtype(work), device=device)
    matmul = max(whole, chunks * (chunk / device.fit.sustained(work.family)))
    return max(matmul, collective) + min(matmul, collective) / chunks - whole


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
