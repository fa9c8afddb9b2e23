"""Collectives: the time of one call, by its bytes and by where its group lies.

The ring and tree formulas are the textbook ones. `collective_seconds` puts them on a placement:
each level of the network that the group crosses has its own bandwidth and latency, and NCCL's
choice among its algorithms is taken to be the fastest one. Assumed away: congestion by other jobs,
and NCCL's own mistakes in choosing.

Notation: S `gathered_bytes`, the full unsharded buffer; n ranks; x = S/n, what a rank sends in a
step of a ring; α the latency of a hop; B a bandwidth, one direction, for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, sqrt
from typing import Literal

from fsdpplan.cost.placement import PlacedLevel, Placement

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One homogeneous link of each rank to the next."""

    bandwidth_bytes_per_second: float
    """One direction."""
    latency_seconds: float
    """Time of one hop of a small message."""


def ring_all_gather_seconds(*, gathered_bytes: float, ranks: int, link: Link) -> float:
    """Time for a ring all-gather after which every rank holds `gathered_bytes`.

        T = (n - 1) * (α + S / (n * B))

    Source: torch 2.13 tensor/_collective_utils.py, allgather_cost, without its base latency.
    Assumes one homogeneous link per rank, not shared with other traffic.
    """
    bytes_per_step = gathered_bytes / ranks
    return (ranks - 1) * (link.latency_seconds + bytes_per_step / link.bandwidth_bytes_per_second)


def ring_reduce_scatter_seconds(*, gathered_bytes: float, ranks: int, link: Link) -> float:
    """Time for a ring reduce-scatter of a buffer of `gathered_bytes` on every rank.

    The all-gather run backwards: the same steps and bytes; the additions are assumed hidden.
    """
    return ring_all_gather_seconds(gathered_bytes=gathered_bytes, ranks=ranks, link=link)


def ring_all_reduce_seconds(*, gathered_bytes: float, ranks: int, link: Link) -> float:
    """Time for a ring all-reduce of `gathered_bytes`: a reduce-scatter, then an all-gather."""
    return ring_reduce_scatter_seconds(
        gathered_bytes=gathered_bytes, ranks=ranks, link=link
    ) + ring_all_gather_seconds(gathered_bytes=gathered_bytes, ranks=ranks, link=link)


def tree_all_reduce_seconds(*, gathered_bytes: float, ranks: int, link: Link) -> float:
    """Time for a pipelined double-binary-tree all-reduce of `gathered_bytes`.

        T = 2 * log2(n) * α + 2 * S * (n - 1) / (n * B)

    Each of two trees carries half of the buffer up and down its n - 1 edges; averaged over the
    ranks that is the ring's volume. Source of the latency: NCCL src/graph/tuning.cc, tree.
    Assumes perfect pipelining and ranks that fill both trees evenly.
    """
    volume_bytes = 2 * gathered_bytes * (ranks - 1) / ranks
    return 2 * log2(ranks) * link.latency_seconds + volume_bytes / link.bandwidth_bytes_per_second


def wire_bytes(*, collective: Collective, gathered_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends: M (N - 1) / N in an all-gather, twice that in an all-reduce."""
    match collective:
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return gathered_bytes * (ranks - 1) / ranks
        case "all_reduce":
            return 2 * gathered_bytes * (ranks - 1) / ranks
        case "send_recv":
            return gathered_bytes if ranks > 1 else 0.0


def collective_seconds(
    *, collective: Collective, gathered_bytes: float, placement: Placement
) -> float:
    """Time of one call on a group placed on the network; one rank costs nothing.

    `gathered_bytes` is the full unsharded buffer: the output of an all-gather, the input of a
    reduce-scatter, the buffer of an all-reduce, what one rank sends in all in an all-to-all, the
    message of a send_recv between neighbours (every rank sends one at the same time).
    """
    if not placement.levels or gathered_bytes <= 0:
        return 0.0
    base_seconds = placement.levels[-1].level.base_seconds
    match collective:
        case "all_gather" | "reduce_scatter":
            return base_seconds + _ring_seconds(gathered_bytes, placement, passes=1)
        case "all_reduce":
            return base_seconds + min(
                _ring_seconds(gathered_bytes, placement, passes=2),
                _tree_seconds(gathered_bytes, placement),
            )
        case "all_to_all":
            return base_seconds + _all_to_all_seconds(gathered_bytes, placement)
        case "send_recv":
            return base_seconds + _send_recv_seconds(gathered_bytes, placement)


def _ramped_seconds(
    volume_bytes: float, bytes_per_step: float, half_bytes: float, bytes_per_second: float
) -> float:
    """Time for `volume_bytes` sent in steps of x at B * 1 / (1 + sqrt(h / x)).

    h is the step at which half of B is reached. One smooth ramp for what NCCL's three protocols
    (LL, LL128, Simple) and its growing number of channels do together; it rises without a jump
    from latency-bound to full bandwidth, so more bytes are never faster.
    """
    return volume_bytes * (1 + sqrt(half_bytes / bytes_per_step)) / bytes_per_second


def _hop_seconds(placement: Placement) -> float:
    """Mean latency of a hop along the ring, by the level at which each edge crosses."""
    total = 0.0
    for placed in placement.levels:
        edges = placed.inner_domains - (placed.domains if placed.domains > 1 else 0)
        total += edges * placed.level.latency_seconds
    return total / placement.ranks


def _ring_seconds(gathered_bytes: float, placement: Placement, *, passes: int) -> float:
    """A ring with `passes` rounds, at the pace of its slowest level, plus the own shard's copy."""
    bytes_per_step = gathered_bytes / placement.ranks
    steps = passes * (placement.ranks - 1)
    slowest = max(
        _ramped_seconds(
            bytes_per_step,
            bytes_per_step,
            placed.level.half_bandwidth_bytes,
            placed.bandwidth_bytes_per_second * placed.level.bandwidth_fraction,
        )
        for placed in placement.levels
    )
    copy_seconds = 3 * bytes_per_step / placement.memory_bytes_per_second
    return steps * (_hop_seconds(placement) + slowest) + copy_seconds


def _tree_seconds(gathered_bytes: float, placement: Placement) -> float:
    """All-reduce inside the innermost domains, and over double binary trees between them.

    Inside, a chain carries the buffer up and down, or (NVLS) the switch reduces and multicasts:
    a rank then sends S and gets S / g back, and the reverse. Between N domains, two trees carry
    half of the buffer each over N - 1 edges, up and down. The levels work at the same time.
    """
    latency_seconds = 0.0
    slowest = 0.0
    bytes_per_step = gathered_bytes / placement.ranks
    for placed in placement.levels:
        level = placed.level
        branches = -(-placed.inner_domains // placed.domains)
        volume_bytes = 2 * gathered_bytes * (branches - 1) / branches
        fraction = level.bandwidth_fraction
        hops = 2 * log2(branches)
        if placed is placement.levels[0]:
            hops = 2.0 * (branches - 1)
            volume_bytes = 2 * gathered_bytes if branches > 2 else volume_bytes
            if level.multicast_fraction and branches > 2:
                hops = 2.0
                fraction = level.multicast_fraction
                volume_bytes = gathered_bytes * (1 + 1 / branches)
        latency_seconds += hops * level.latency_seconds
        slowest = max(
            slowest,
            _ramped_seconds(
                volume_bytes,
                bytes_per_step,
                level.half_bandwidth_bytes,
                placed.bandwidth_bytes_per_second * fraction,
            ),
        )
    return latency_seconds + slowest


def _all_to_all_seconds(gathered_bytes: float, placement: Placement) -> float:
    """Each rank sends S / n to each other rank; at each level, what must leave its domains."""
    ranks = placement.ranks
    bytes_per_step = gathered_bytes / ranks
    slowest = max(_all_to_all_level_seconds(bytes_per_step, ranks, p) for p in placement.levels)
    copy_seconds = 3 * bytes_per_step / placement.memory_bytes_per_second
    return (ranks - 1) * _hop_seconds(placement) + slowest + copy_seconds


def _all_to_all_level_seconds(bytes_per_step: float, ranks: int, placed: PlacedLevel) -> float:
    inside = placed.inner_ranks
    leaving_bytes = inside * (ranks - inside) * bytes_per_step
    return _ramped_seconds(
        leaving_bytes,
        bytes_per_step,
        placed.level.half_bandwidth_bytes,
        placed.bandwidth_bytes_per_second * placed.level.bandwidth_fraction,
    )


def _send_recv_seconds(message_bytes: float, placement: Placement) -> float:
    """Every rank of the group sends to its neighbour: the worst edge sets the time."""
    worst = 0.0
    for placed in placement.levels:
        bandwidth = placed.rank_bandwidth_bytes_per_second * placed.level.bandwidth_fraction
        seconds = placed.level.latency_seconds + _ramped_seconds(
            message_bytes, message_bytes, placed.level.half_bandwidth_bytes, bandwidth
        )
        worst = max(worst, seconds)
    return worst
