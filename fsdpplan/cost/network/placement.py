"""Placement: where a group of ranks falls on the levels of the network, and what it gets there.

Ranks are numbered node by node (rank = node * gpus_per_node + local), so a domain of a level
with `domain_gpus` d holds the ranks [i * d, (i + 1) * d). A group takes every `stride`-th rank;
groups of one shape tile the cluster and, being one mesh axis, work at the same time.

Groups: the process groups of a layout, by their shape.

A group takes every `stride`-th rank; the axes of the mesh, outermost first, are
`pp, dp_replicate, dp_shard, cp, tp`. Expert-parallel groups are cut out of `dp_shard * cp`, nearest
ranks first, as torchtitan and Megatron Core place them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Cluster, Level
from fsdpplan.spec.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLevel:
    """What one group has of one level that it crosses."""

    level: Level
    """The level itself, with its fitted numbers."""
    inner_domains: int
    """Domains of the level below that the group touches (its ranks, at the innermost level)."""
    domains: int
    """Domains of this level that the group touches; 1 at the outermost."""
    inner_ranks: int
    """Fewest ranks of the group in one domain of the level below."""
    groups: int
    """Most groups that leave one domain of the level below at the same time."""
    bandwidth_bytes_per_second: float
    """Datasheet bandwidth of the group out of one domain of the level below."""
    rank_bandwidth_bytes_per_second: float
    """The same for one rank on its own: a point-to-point message."""
    between_nodes: bool
    """It joins nodes and is not the innermost level (NVLink may join nodes, too)."""

    @property
    def crowding(self) -> float:
        """How much longer the bytes of a collective take than over two domains.

            max(1, N / 2)^x

        Each group of N domains has more routes that may collide and more ranks that may be late.
        """
        if not self.level.crowding_exponent or not self.between_nodes:
            return 1.0
        branches = -(-self.inner_domains // self.domains)
        return float(max(1.0, branches / 2) ** self.level.crowding_exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A group of ranks on the network; hashable, and all that a collective's time needs."""

    ranks: int
    """Ranks in the group."""
    stride: int
    """Ranks between neighbours of the group."""
    levels: tuple[PlacedLevel, ...]
    """Levels that the group crosses, innermost first; empty for one rank."""
    memory_bytes_per_second: float
    """Datasheet bandwidth of a rank's own memory."""

    @property
    def level_name(self) -> str:
        """Outermost level that the group crosses; `none` for one rank."""
        return self.levels[-1].level.name if self.levels else "none"

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """Datasheet bus bandwidth of a ring over the group: the least over the levels it crosses.

        With g ranks of the group in a node it is the least of what a rank gets inside and of the
        ports those g ranks drive together, shared with the groups that run at the same time.
        Infinite for one rank. Source: how NCCL's rings, one for each port, cross a node boundary
        once each.
        """
        return min(
            (placed.bandwidth_bytes_per_second for placed in self.levels), default=float("inf")
        )


@dataclass(frozen=True, slots=True)
class _Spread:
    """How groups of one shape fall on domains of one size: the worst of each over all groups."""

    domains: int
    ranks: int
    groups: int


def group_placement(
    *, cluster: Cluster, ranks: int, stride: int, groups_at_once: int | None = None
) -> Placement:
    """Placement of a group that takes every `stride`-th of `ranks * stride` neighbouring ranks.

    `groups_at_once` is how many such groups communicate together; None: all that there are.
    """
    return _group_placement(cluster, ranks, stride, groups_at_once)


@lru_cache(maxsize=4096)
def _group_placement(
    cluster: Cluster, ranks: int, stride: int, groups_at_once: int | None
) -> Placement:
    if ranks < 1 or stride < 1 or cluster.gpus % (ranks * stride):
        raise SpecError(
            f"groups of {ranks} ranks, {stride} apart, do not tile {cluster.gpus} GPUs: "
            f"ranks * stride must divide {cluster.gpus}"
        )
    placed: list[PlacedLevel] = []
    inside = _Spread(domains=ranks, ranks=1, groups=1)
    inner_gpus = 1
    for level in cluster.levels:
        if inside.domains == 1:
            break
        outside = _spread(level.domain_gpus, ranks, stride, cluster.gpus)
        groups = min(inside.groups, groups_at_once or inside.groups)
        placed.append(_placed_level(cluster, level, inner_gpus, inside, outside, groups))
        inside, inner_gpus = outside, level.domain_gpus
    return Placement(
        ranks=ranks,
        stride=stride,
        levels=tuple(placed),
        memory_bytes_per_second=cluster.device.memory_bandwidth_bytes_per_second,
    )


def _placed_level(
    cluster: Cluster,
    level: Level,
    inner_gpus: int,
    inside: _Spread,
    outside: _Spread,
    groups: int,
) -> PlacedLevel:
    return PlacedLevel(
        level=level,
        inner_domains=inside.domains,
        domains=outside.domains,
        inner_ranks=inside.ranks,
        groups=groups,
        bandwidth_bytes_per_second=_exit_bandwidth(
            cluster, level, inner_gpus=inner_gpus, ranks=inside.ranks, groups=groups
        ),
        rank_bandwidth_bytes_per_second=_exit_bandwidth(
            cluster, level, inner_gpus=inner_gpus, ranks=1, groups=groups
        ),
        between_nodes=level is not cluster.levels[0] and level.domain_gpus > cluster.gpus_per_node,
    )


def _exit_bandwidth(
    cluster: Cluster, level: Level, *, inner_gpus: int, ranks: int, groups: int
) -> float:
    """Bandwidth out of a domain of the level below for one group with `ranks` ranks in it.

    The least of the ports that the ranks drive (each its nearest ones), of the group's share of
    all ports, and, without GPUDirect, of the way through host memory: data crosses the host link
    and is read again by the port, so a rank has half its host link.
    """
    port = level.port_bandwidth_bytes_per_second
    driven_ports = min(level.ports, ranks * max(1.0, level.ports / inner_gpus))
    bandwidth = port * min(driven_ports, level.ports / groups)
    if level.gpudirect or cluster.device.kind == "cpu":
        return bandwidth
    return min(bandwidth, ranks * cluster.device.host_link_bytes_per_second / 2)


def _spread(domain_gpus: int, ranks: int, stride: int, gpus: int) -> _Spread:
    """How the groups fall on domains of `domain_gpus`; exact also where they straddle domains."""
    block = ranks * stride
    if domain_gpus >= gpus or domain_gpus % block == 0:
        return _Spread(domains=1, ranks=ranks, groups=1)
    if block % domain_gpus == 0 and (domain_gpus % stride == 0 or stride % domain_gpus == 0):
        inner_ranks = max(1, domain_gpus // stride)
        return _Spread(
            domains=ranks // inner_ranks, ranks=inner_ranks, groups=min(stride, domain_gpus)
        )
    return _straddling_spread(domain_gpus, ranks, stride, gpus)


def _straddling_spread(domain_gpus: int, ranks: int, stride: int, gpus: int) -> _Spread:
    """`_spread` where groups and domains do not nest: walk over one period of both."""
    block = ranks * stride
    period = lcm(block, domain_gpus)
    if gpus % period:  # the last domain is cut short by the end of the cluster
        period = gpus
    domains = max(
        _touched_domains(start, domain_gpus, ranks, stride) for start in range(0, period, block)
    )
    fewest_ranks, most_groups = ranks, 1
    for start in range(0, period, domain_gpus):
        stop = min(start + domain_gpus, gpus)
        leaving_groups = 0
        for block_start in range(start - start % block, stop, block):
            covered = min(stop, block_start + block) - max(start, block_start)
            if covered == block:
                continue
            whole, rest = divmod(covered, stride)  # `rest` groups have one rank more
            leaving_groups += (stride - rest if whole else 0) + (rest if whole + 1 < ranks else 0)
            fewest_ranks = min(fewest_ranks, whole or 1)
        most_groups = max(most_groups, leaving_groups)
    return _Spread(domains=domains, ranks=fewest_ranks, groups=most_groups)


def _touched_domains(start: int, domain_gpus: int, ranks: int, stride: int) -> int:
    """Most domains that one of the `stride` groups beginning at `start` touches."""
    if stride >= domain_gpus:
        return ranks
    last = start + stride - 1
    has_domain_end = (start // domain_gpus) != ((last + 1) // domain_gpus)
    offset = domain_gpus - 1 if has_domain_end else last % domain_gpus
    return (offset + (ranks - 1) * stride) // domain_gpus + 1


class Group(NamedTuple):
    """A process group by its shape: what placement on the network needs."""

    axis: str
    ranks: int
    stride: int
    """Ranks between neighbours of the group."""


def shard_group(layout: Layout) -> Group:
    """The ranks over which parameters, gradients or optimizer state are sharded."""
    axis = "dp_shard" if layout.cp == 1 else "dp_shard*cp"
    return Group(axis=axis, ranks=layout.shard_ranks, stride=layout.tp)


def regather_group(layout: Layout) -> Group:
    """The ranks from which backward gathers: fewer under an integer reshard."""
    whole = shard_group(layout)
    if isinstance(layout.reshard_after_forward, int):
        return Group(axis=whole.axis, ranks=layout.reshard_after_forward, stride=whole.stride)
    return whole


def replicate_group(layout: Layout) -> Group:
    """The ranks that hold copies of one shard."""
    return Group(
        axis="dp_replicate",
        ranks=layout.dp_replicate,
        stride=layout.shard_ranks * layout.tp,
    )


def data_parallel_group(layout: Layout) -> Group:
    """All ranks that see other tokens, replicas and shards: where whole gradients are reduced."""
    if layout.dp_replicate == 1:
        return shard_group(layout)
    if layout.shard_ranks == 1:
        return replicate_group(layout)
    return Group(
        axis=f"dp_replicate*{shard_group(layout).axis}",
        ranks=layout.dp_replicate * layout.shard_ranks,
        stride=layout.tp,
    )


def ep_group(layout: Layout) -> Group:
    """The ranks over which routed experts are split; neighbours where tensor-parallel ranks are
    among them."""
    stride = 1 if layout.experts_over_tp else layout.tp
    return Group(axis="ep", ranks=layout.expert_ranks, stride=stride)


def expert_shard_group(layout: Layout) -> Group:
    """The ranks over which the experts of one expert-parallel rank are sharded."""
    whole = shard_group(layout)
    if layout.ep == 1:
        return whole
    return Group(
        axis=f"{whole.axis}/ep",
        ranks=layout.shard_ranks // layout.ep,
        stride=layout.tp * layout.ep,
    )


def cp_group(layout: Layout) -> Group:
    """The ranks that split each sequence."""
    return Group(axis="cp", ranks=layout.cp, stride=layout.tp)


def tp_group(layout: Layout) -> Group:
    """The tensor-parallel ranks."""
    return Group(axis="tp", ranks=layout.tp, stride=1)


def pp_group(layout: Layout) -> Group:
    """The pipeline's ranks."""
    return Group(axis="pp", ranks=layout.pp, stride=layout.world // layout.pp)
