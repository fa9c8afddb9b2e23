"""Collectives: the time of one call, by its bytes and by where its group lies.

The ring and tree formulas are the textbook ones, put on a placement:
each level of the network that the group crosses has its own bandwidth and latency, and NCCL's
choice among its algorithms is taken to be the fastest one. Assumed away: congestion by other jobs,
and NCCL's own mistakes in choosing.

Notation: S `gathered_bytes`, the full unsharded buffer; n ranks; x = S/n, what a rank sends in a
step of a ring; α the latency of a hop; B a bandwidth, one direction, for each rank.

Protocols: how NCCL's three ways to move a chunk trade bandwidth for latency.

LL sends a flag beside every 4 bytes, LL128 one beside every 120, Simple synchronises by chunk. The
numbers are those of NCCL's own tuning model (src/graph/tuning.cc: baseLatencies, hwLatencies,
llMaxBws, and the refinements in ncclTopoTuneModel); nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log2

from fsdpplan.cost.network.placement import PlacedLevel, Placement
from fsdpplan.spec.cluster import Level, LowLatency
from fsdpplan.spec.plan import Collective as Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What one protocol costs and carries."""

    name: LowLatency
    """The least that links must be capable of; `none` for Simple."""
    base_seconds: float | None
    """Start of a call; None: the level's own, which is fitted."""
    inner_hop_seconds: float
    """Hop inside a node beyond that of LL."""
    outer_hop_seconds: float
    """Hop between nodes beyond that of LL."""
    share: float
    """Share of the bandwidth that a ring gets."""
    tree_share: float
    """Share of the bandwidth that a tree gets."""
    inner_port_share: float = 1.0
    """Most of the links' datasheet bandwidth inside a node."""
    outer_cap_bytes_per_second: float = float("inf")
    """Most that one group gets between nodes, whatever its ports."""


SIMPLE = Protocol(
    name="none",
    base_seconds=None,
    inner_hop_seconds=2.8e-6,
    outer_hop_seconds=11.3e-6,
    share=1.0,
    tree_share=0.92,
)
LL128 = Protocol(
    name="ll128",
    base_seconds=14e-6,
    inner_hop_seconds=1.3e-6,
    outer_hop_seconds=1.3e-6,
    share=0.92,
    tree_share=0.92 * 120 / 128,
)
LL = Protocol(
    name="ll",
    base_seconds=6.6e-6,
    inner_hop_seconds=0.0,
    outer_hop_seconds=0.0,
    share=0.5,
    tree_share=0.92 / 3.8,
    # llMaxBws: 87.7 of 300 GB/s on A100, 141 of 450 on H100, 282 of 900 on B200
    inner_port_share=0.31,
    # llMaxBws over three nodes and more with Intel hosts; AMD hosts 19 to 35 GB/s
    outer_cap_bytes_per_second=20.4e9,
)

_CAPABLE: dict[LowLatency, tuple[Protocol, ...]] = {
    "none": (SIMPLE,),
    "ll": (SIMPLE, LL),
    "ll128": (SIMPLE, LL, LL128),
}


def protocols(links: tuple[LowLatency, ...]) -> tuple[Protocol, ...]:
    """The protocols that run over all of `links`: the least capable decides."""
    return min((_CAPABLE[link] for link in links), key=len)


_COPY_PASSES = 4
"""Passes over the own shard at the full memory bandwidth that its copy is worth: one read and one
write, at half of the bandwidth because NCCL has few multiprocessors."""

MESSAGES_AT_ONCE = 8
"""Messages to other ranks that one channel has under way together.
Source: NCCL src/include/device.h, NCCL_MAX_DEV_WORK_P2P_PER_BATCH; one channel a peer between nodes
is the least that it takes."""


def wire_bytes(*, collective: Collective, gathered_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends: M (N - 1) / N in an all-gather, twice that in an all-reduce."""
    match collective:
        case "all_gather" | "reduce_scatter" | "all_to_all" | "broadcast":
            return gathered_bytes * (ranks - 1) / ranks
        case "all_reduce":
            return 2 * gathered_bytes * (ranks - 1) / ranks
        case "send_recv":
            return gathered_bytes if ranks > 1 else 0.0


def collective_seconds(
    *,
    collective: Collective,
    gathered_bytes: float,
    placement: Placement,
    leaving_share: float = 1.0,
) -> float:
    """Time of one call on a group placed on the network; one rank costs nothing.

    `gathered_bytes` is the full unsharded buffer: the output of an all-gather, the input of a
    reduce-scatter, the buffer of an all-reduce, what one rank sends in all in an all-to-all, the
    message of a send_recv between neighbours (every rank sends one at the same time), what one rank
    sends to all in a broadcast. Of an all-to-all no more than `leaving_share` of it leaves a node.

    The least over NCCL's protocols, and for an all-reduce over its algorithms: each grows with the
    bytes, so that more bytes are never faster.
    """
    if not placement.levels or gathered_bytes <= 0:
        return 0.0
    choices = protocols(tuple(placed.level.low_latency for placed in placement.levels))
    match collective:
        case "all_gather" | "reduce_scatter":
            return min(_ring_seconds(gathered_bytes, placement, p, passes=1) for p in choices)
        case "all_reduce":
            rings = (_ring_seconds(gathered_bytes, placement, p, passes=2) for p in choices)
            trees = (_tree_seconds(gathered_bytes, placement, p) for p in choices)
            return min(*rings, *trees, _switch_seconds(gathered_bytes, placement))
        case "all_to_all":
            return min(
                _all_to_all_seconds(gathered_bytes, placement, p, leaving_share) for p in choices
            )
        case "send_recv":
            return min(_send_recv_seconds(gathered_bytes, placement, p) for p in choices)
        case "broadcast":
            return _broadcast_seconds(gathered_bytes, placement)


def _start_seconds(placement: Placement, protocol: Protocol) -> float:
    """Launch and synchronisation of a call; of the outermost level, which is the slowest."""
    before = placement.levels[0].level.start_seconds
    if protocol.base_seconds is not None:
        return before + protocol.base_seconds
    return before + placement.levels[-1].level.base_seconds


def _hop_seconds(placed: PlacedLevel, protocol: Protocol) -> float:
    """One hop over a level."""
    outer = placed.between_nodes
    extra = protocol.outer_hop_seconds if outer else protocol.inner_hop_seconds
    return placed.level.latency_seconds + extra


def _ring_hop_seconds(placement: Placement, protocol: Protocol) -> float:
    """Mean hop along the ring, by the level at which each edge crosses."""
    total = 0.0
    for placed in placement.levels:
        edges = placed.inner_domains - (placed.domains if placed.domains > 1 else 0)
        total += edges * _hop_seconds(placed, protocol)
    return total / placement.ranks


def _bandwidth(
    placed: PlacedLevel,
    protocol: Protocol,
    share: float,
    *,
    alone: bool = False,
) -> float:
    """What `protocol` carries of a group's bandwidth at one level, in bytes per second; `alone`: of
    one rank's."""
    datasheet = placed.bandwidth_bytes_per_second
    if alone:
        datasheet = placed.rank_bandwidth_bytes_per_second
    carried = datasheet * placed.level.bandwidth_fraction * share
    if not alone:
        carried /= placed.crowding
    if placed.between_nodes:
        return min(carried, protocol.outer_cap_bytes_per_second)
    return min(carried, datasheet * protocol.inner_port_share)


def _filling_seconds(
    volume_bytes: float, level: Level, bytes_per_second: float, protocol: Protocol, hops: float
) -> float:
    """Simple moves whole chunks: a pipeline of `hops` fills with them before it runs at its rate.

        hops * c / B,  c = h * V / (V + h)

    A chunk has h bytes in all channels together, less where there are not as many to send.
    """
    if protocol is not SIMPLE:
        return 0.0
    half_bytes = level.half_bandwidth_bytes
    return hops * half_bytes * volume_bytes / (volume_bytes + half_bytes) / bytes_per_second


def _ring_seconds(
    gathered_bytes: float, placement: Placement, protocol: Protocol, *, passes: int
) -> float:
    """A ring of n ranks at the pace of its slowest level, plus the own shard's copy.

        T = base + r * ((n - 1) * α + S * (n - 1) / (n * B))

    An all-gather goes round once (r, `passes`), a reduce-scatter is the same backwards, an
    all-reduce is one after the other. Source: torch 2.13 tensor/_collective_utils.py,
    allgather_cost.
    """
    ranks = placement.ranks
    volume_bytes = passes * gathered_bytes * (ranks - 1) / ranks
    slowest = 0.0
    for placed in placement.levels:
        bandwidth = _bandwidth(placed, protocol, protocol.share)
        filling = _filling_seconds(volume_bytes, placed.level, bandwidth, protocol, passes)
        slowest = max(slowest, volume_bytes / bandwidth + filling)
    hops_seconds = passes * (ranks - 1) * _ring_hop_seconds(placement, protocol)
    copied = _copy_seconds(gathered_bytes, placement)
    return _start_seconds(placement, protocol) + hops_seconds + slowest + copied


def _broadcast_seconds(gathered_bytes: float, placement: Placement) -> float:
    """One rank's buffer along the ring to all others: each hop passes on whole chunks.

        T = base + (n - 1) * (α + c / B) + S / B,  c = h * S / (h + 4 S)

    A chunk is one of NCCL's steps, of which a gather's has four (src/include/collectives.h,
    BROADCAST_CHUNKSTEPS and ALLGATHER_CHUNKSTEPS); its tuning model counts the latency of one hop
    whatever the ranks (src/graph/tuning.cc), and so takes Simple.
    """
    ranks = placement.ranks
    hops_seconds = (ranks - 1) * _ring_hop_seconds(placement, SIMPLE)
    slowest = 0.0
    for placed in placement.levels:
        half_bytes = placed.level.half_bandwidth_bytes
        chunk_bytes = half_bytes * gathered_bytes / (half_bytes + 4 * gathered_bytes)
        bandwidth = _bandwidth(placed, SIMPLE, SIMPLE.share)
        edges = placed.inner_domains - (placed.domains if placed.domains > 1 else 0)
        hops_seconds += (ranks - 1) * edges / ranks * chunk_bytes / bandwidth
        slowest = max(slowest, gathered_bytes / bandwidth)
    return _start_seconds(placement, SIMPLE) + hops_seconds + slowest


def _copy_seconds(gathered_bytes: float, placement: Placement) -> float:
    """The own shard goes from the input into the output on few multiprocessors."""
    return _COPY_PASSES * gathered_bytes / placement.ranks / placement.memory_bytes_per_second


def _tree_seconds(gathered_bytes: float, placement: Placement, protocol: Protocol) -> float:
    """All-reduce along a chain in each node, and over double binary trees between nodes.

    The chain carries the buffer up and down over its g - 1 edges; each channel begins it at another
    rank, so that all send alike. Between N domains, two trees carry half of the buffer each over
    N - 1 edges, up and down, so that a rank sends what it would in a ring:

        T = base + 2 * log2(N) * α + 2 * S * (N - 1) / (N * B)

    The levels work at the same time. Source of the latency: NCCL src/graph/tuning.cc, tree.
    """
    hops_seconds = 0.0
    hops = 0.0
    slowest = 0.0
    for placed in placement.levels:
        level = placed.level
        branches = -(-placed.inner_domains // placed.domains)
        level_hops = 2 * log2(branches) if placed.between_nodes else 2.0 * (branches - 1)
        volume_bytes = 2 * gathered_bytes * (branches - 1) / branches
        hops += level_hops
        hops_seconds += level_hops * _hop_seconds(placed, protocol)
        bandwidth = _bandwidth(placed, protocol, protocol.tree_share)
        filling = _filling_seconds(gathered_bytes, level, bandwidth, protocol, hops)
        slowest = max(slowest, volume_bytes / bandwidth + filling)
    return _start_seconds(placement, protocol) + hops_seconds + slowest


def _switch_seconds(gathered_bytes: float, placement: Placement) -> float:
    """NVLS: the switch of the innermost level reduces and multicasts; trees between domains.

    A rank sends S and gets S / g back, and the reverse. Infinite where the switch cannot.
    """
    inner = placement.levels[0]
    ranks = -(-inner.inner_domains // inner.domains)
    if not inner.level.multicast_fraction or ranks <= 2:
        return inf
    hops = 2.0
    hops_seconds = 2 * _hop_seconds(inner, SIMPLE)
    bandwidth = inner.bandwidth_bytes_per_second * inner.level.multicast_fraction
    volume_bytes = gathered_bytes * (1 + 1 / ranks)
    filling = _filling_seconds(gathered_bytes, inner.level, bandwidth, SIMPLE, hops)
    slowest = volume_bytes / bandwidth + filling
    for placed in placement.levels[1:]:
        branches = -(-placed.inner_domains // placed.domains)
        level_hops = 2 * log2(branches)
        hops += level_hops
        hops_seconds += level_hops * _hop_seconds(placed, SIMPLE)
        bandwidth = _bandwidth(placed, SIMPLE, SIMPLE.share)
        volume_bytes = 2 * gathered_bytes * (branches - 1) / branches
        filling = _filling_seconds(gathered_bytes, placed.level, bandwidth, SIMPLE, hops)
        slowest = max(slowest, volume_bytes / bandwidth + filling)
    return _start_seconds(placement, SIMPLE) + hops_seconds + slowest


def _all_to_all_seconds(
    gathered_bytes: float, placement: Placement, protocol: Protocol, leaving_share: float = 1.0
) -> float:
    """Each rank sends S / n to each other rank; at each level, what must leave its domains.

    What goes to several ranks of another node may go there once, to be passed on inside: then less
    than its even part leaves a node, and as much as before goes over the links inside.

    Messages to ranks of other nodes are under way eight at a time, so that their hops are paid once
    for eight of them; inside a node they are taken one by one, as measured ones are.
    """
    ranks = placement.ranks
    slowest = hops_seconds = 0.0
    domains = (*(placed.inner_ranks for placed in placement.levels[1:]), ranks)
    for placed, domain_ranks in zip(placement.levels, domains, strict=True):
        inside = placed.inner_ranks
        peers = max(0, domain_ranks - inside)
        rounds = -(-peers // MESSAGES_AT_ONCE) if placed.between_nodes else peers
        hops_seconds += rounds * _hop_seconds(placed, protocol)
        leaving_bytes = inside * (ranks - inside) * gathered_bytes / ranks
        if placed.between_nodes:
            leaving_bytes = min(leaving_bytes, inside * leaving_share * gathered_bytes)
        bandwidth = _bandwidth(placed, protocol, protocol.share)
        filling = _filling_seconds(leaving_bytes, placed.level, bandwidth, protocol, 1)
        slowest = max(slowest, leaving_bytes / bandwidth + filling)
    copied = _copy_seconds(gathered_bytes, placement)
    return _start_seconds(placement, protocol) + hops_seconds + slowest + copied


def _send_recv_seconds(message_bytes: float, placement: Placement, protocol: Protocol) -> float:
    """Every rank of the group sends to its neighbour: the worst edge sets the time."""
    worst = 0.0
    for placed in placement.levels:
        bandwidth = _bandwidth(placed, protocol, protocol.share, alone=True)
        seconds = _hop_seconds(placed, protocol) + message_bytes / bandwidth
        filling = _filling_seconds(message_bytes, placed.level, bandwidth, protocol, 1)
        worst = max(worst, seconds + filling)
    return _start_seconds(placement, protocol) + worst
