"""Block times: what one block takes in a micro-batch, computed once for all layouts whose blocks do
the same.

A search prices thousands of layouts, and their blocks do a few dozen things: how gradients are
reduced, how often, over how many ranks, decides nothing of what is inside a block.

Block waiting: what the collectives inside a block add to its time.

A collective that runs beside a matmul hides behind it as far as that lasts; in chunks, one a rank,
the first chunk of one of the two runs alone:

    T = max(matmul in chunks, collective) + min(matmul in chunks, collective) / n

What is hidden still slows the matmul down (`slowdown`). Where a pass waits for its host, the device
has time to spare, and a collective hides in it, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.kernels.attention import attention_backward_seconds, attention_forward_seconds
from fsdpplan.cost.kernels.compute import block_seconds
from fsdpplan.cost.kernels.products import Product, block_products, product_seconds
from fsdpplan.cost.kernels.work import BlockSeconds, BlockWork
from fsdpplan.cost.model.ways import Ways, block_ways, inner_ways
from fsdpplan.cost.overlap.timing import block_work
from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.cost.traffic.calls import BlockCall, Piece, group_seconds
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster, Device

PIECE_PRODUCTS: dict[Piece, tuple[str, ...]] = {
    "attention_in": ("wq", "wk", "wv"),
    "attention_out": ("wo",),
    "ffn_in": ("w1", "w3"),
    "ffn_out": ("w2",),
}
"""Products behind or before a tensor-parallel collective, by the name of their weight."""

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
    once = group_seconds(cluster, call.group, call.collective, call.call_bytes, call.leaving_share)
    total = call.count * once
    device = cluster.device
    if call.overlap == "none" or not call.piece:
        return total
    if call.overlap == "scores":
        beside = call.share * _scores_seconds(call, work, device)
        return max(0.0, total - beside)
    products = _products(call.piece, work)
    if not products:
        return total
    if call.overlap == "chunks":
        return min(total, _chunked_seconds(products, total, call.group.ranks, work, device))
    return max(0.0, total - _beside_seconds(call, products, work, device))


def _scores_seconds(call: BlockCall, work: BlockWork, device: Device) -> float:
    if call.when == "backward":
        return attention_backward_seconds(work, device)
    return attention_forward_seconds(work, device)


def _products(piece: Piece, work: BlockWork) -> tuple[Product, ...]:
    names = PIECE_PRODUCTS.get(piece, ())
    return tuple(product for product in block_products(work) if product.name in names)


def _seconds(products: tuple[Product, ...], work: BlockWork, device: Device) -> float:
    """Seconds of products at the sustained rate."""
    seconds = sum(
        product_seconds(product, dtype=product.dtype(work), device=device) for product in products
    )
    return seconds / device.fit.sustained(work.family)


def _chunked_seconds(
    products: tuple[Product, ...], collective: float, chunks: int, work: BlockWork, device: Device
) -> float:
    """What the collective adds to matmuls that are cut with it into `chunks` chunks of rows."""
    whole = _seconds(products, work, device)
    chunk = tuple(replace(product, rows=product.rows / chunks) for product in products)
    matmul = max(whole, chunks * _seconds(chunk, work, device))
    return max(matmul, collective) + min(matmul, collective) / chunks - whole


def _beside_seconds(
    call: BlockCall, products: tuple[Product, ...], work: BlockWork, device: Device
) -> float:
    """Backward's matmuls that make gradients of inputs, or of weights: as large as forward's."""
    if call.overlap == "inputs":
        return _seconds(tuple(product.by_input for product in products), work, device)
    return _seconds(products, work, device)


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
