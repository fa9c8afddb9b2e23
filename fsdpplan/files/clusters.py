"""Clusters of some size, made from node and cluster profiles with the user's flags laid over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.catalogue import load_device, load_machines, load_node
from fsdpplan.files.profiles.devices import DeviceProfile
from fsdpplan.files.profiles.levels import SOCKETS, LevelProfile, check_levels, levels_of
from fsdpplan.files.profiles.nodes import (
    ClusterProfile,
    NodeProfile,
    NodeType,
    UniformCluster,
    slowest_of,
)
from fsdpplan.files.profiles.numbers import Sources
from fsdpplan.files.table import short
from fsdpplan.spec.cluster import NVLINK, Cluster, Level, WeakSpot
from fsdpplan.spec.nodes import VERBS, Network, compress_host_list
from fsdpplan.spec.weak import weakened
from fsdpplan.units import format_percent

_MAX_GPUS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCluster:
    """A cluster and, for each of its fields, where the value comes from."""

    cluster: Cluster
    sources: Sources
    parts: tuple[Cluster, ...] = ()
    """Of a cluster with several types of nodes: the nodes of each type alone."""
    warnings: tuple[str, ...] = ()
    """What holds the cluster back, in sentences."""
    leaves_idle: bool = False
    """Some GPUs of each of several nodes are left out, so that all nodes give as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the user says over a profile; bandwidths are per GPU and one direction."""

    gpus: int | None = None
    gpus_per_node: int | None = None
    domain_gpus: int | None = None
    device: str | None = None
    intra_bandwidth_bytes_per_second: float | None = None
    inter_bandwidth_bytes_per_second: float | None = None
    host_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    """Equal nodes, and what joins them."""

    name: str
    node: NodeProfile
    folder: Path | None
    levels: tuple[LevelProfile, ...]
    network: Network | None
    weak: tuple[WeakSpot, ...]
    sources: Sources


def load_cluster(
    name_or_path: str,
    *,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    domain_gpus: int | None = None,
    device: str | None = None,
    intra_bandwidth_bytes_per_second: float | None = None,
    inter_bandwidth_bytes_per_second: float | None = None,
    host_memory_bytes: int | None = None,
) -> LoadedCluster:
    """A cluster of `gpus` devices from a node or cluster profile, with the flags laid over it.

    Bandwidths are per GPU and one direction. Fewer GPUs than a node has use a part of one node, and
    `domain_gpus` a part of each domain of NVLink that joins nodes; `host_memory_bytes` are a
    node's.
    """
    flags = Flags(
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        domain_gpus=domain_gpus,
        device=device,
        intra_bandwidth_bytes_per_second=intra_bandwidth_bytes_per_second,
        inter_bandwidth_bytes_per_second=inter_bandwidth_bytes_per_second,
        host_memory_bytes=host_memory_bytes,
    )
    profile, folder = load_machines(name_or_path)
    return cluster_of(profile, folder, flags)


def cluster_of(
    profile: NodeProfile | ClusterProfile, folder: Path | None, flags: Flags
) -> LoadedCluster:
    """A cluster from a profile that has been read; `folder`: where its relatives may lie."""
    if isinstance(profile, NodeProfile):
        nodes = _Nodes(
            name=profile.name,
            node=profile,
            folder=folder,
            levels=profile.levels,
            network=profile.network,
            weak=profile.weak,
            sources=(),
        )
        return _warned(_equal_nodes(nodes, profiled=profile.gpus_per_node, flags=flags))
    if len(profile.node_types) > 1:
        return _warned(_mixed(profile, folder, flags))
    (only,) = profile.node_types
    nodes = _nodes_of(profile, only, folder)
    count = profile.gpus or only.num_nodes * (nodes.node.gpus_per_node or 1)
    loaded = _warned(_equal_nodes(nodes, profiled=count, flags=flags))
    if loaded.cluster.gpus <= count:
        return loaded
    more = f"{profile.name} has {count:,} GPUs: planned as if its outermost level joined more"
    return replace(loaded, warnings=(more, *loaded.warnings))


def _nodes_of(profile: ClusterProfile, kind: NodeType, folder: Path | None) -> _Nodes:
    """The nodes of one type of a cluster, joined as the cluster says."""
    node = load_node(kind.node, beside=folder)
    levels = node.levels
    if profile.levels:
        inside = tuple(level for level in node.levels if level.joins != "cluster")
        levels = (*inside, *profile.levels)
        check_levels(levels, gpus_per_node=node.gpus_per_node, where=profile.name)
    return _Nodes(
        name=profile.name,
        node=node,
        folder=folder,
        levels=levels,
        network=profile.network or node.network,
        weak=(*node.weak, *_weak_of(profile, kind, levels)),
        sources=profile.sources,
    )


def _weak_of(
    profile: ClusterProfile, kind: NodeType, levels: tuple[LevelProfile, ...]
) -> list[WeakSpot]:
    """The cluster's weak spots that this type of nodes may have: all where there is one type, else
    those of its names and levels."""
    if len(profile.node_types) == 1:
        return list(profile.weak)
    known = {None, *(level.level.name for level in levels)}
    return [
        spot
        for spot in profile.weak
        if spot.level in known and (not kind.names or {*kind.names} & {*spot.nodes})
    ]


def _equal_nodes(nodes: _Nodes, *, profiled: int | None, flags: Flags) -> LoadedCluster:
    node = nodes.node
    count = _gpu_count(node, asked=flags.gpus, profiled=profiled)
    per_node = _gpus_per_node(node, gpus=count, asked=flags.gpus_per_node)
    chosen = _device(nodes, flags.device)
    nodes, taken = _networked(nodes, flags) if count > per_node else (nodes, ())
    levels = levels_of(
        nodes.levels,
        gpus=count,
        per_node=per_node,
        whole_node=node.gpus_per_node or per_node,
        name=nodes.name,
        domain_gpus=flags.domain_gpus,
    )
    cluster = Cluster(
        name=nodes.name,
        device=chosen.device,
        gpus=count,
        gpus_per_node=per_node,
        levels=levels,
        network=nodes.network if count > per_node else None,
        host_memory_bytes_per_second=node.host_memory_bytes_per_second,
        host_memory_bytes=flags.host_memory_bytes or node.host_memory_bytes,
    )
    _require_one_word_on_gpudirect(cluster)
    named = dict((*chosen.sources, *node.sources, *nodes.sources))
    given = {
        "cluster.gpus": ("--gpus", flags.gpus),
        "cluster.gpus_per_node": ("--gpus-per-node", flags.gpus_per_node),
        f"cluster.levels.{NVLINK}.domain_gpus": ("--domain-gpus", flags.domain_gpus),
        "cluster.device": ("--gpu", flags.device),
        "cluster.host_memory_bytes": ("--host-memory", flags.host_memory_bytes),
    }
    named |= {field: f"flag {flag}" for field, (flag, value) in given.items() if value is not None}
    if flags.intra_bandwidth_bytes_per_second is not None:
        cluster = with_intra(cluster, flags.intra_bandwidth_bytes_per_second)
        named |= _level_sources(cluster.levels[0], "flag --intra-bw, per GPU and direction")
    if flags.inter_bandwidth_bytes_per_second is not None:
        cluster = with_inter(cluster, flags.inter_bandwidth_bytes_per_second)
        named |= _level_sources(cluster.levels[-1], "flag --inter-bw, per GPU and direction")
    beyond = {profile.level.name for profile in nodes.levels} - {level.name for level in levels}
    cluster = weakened(cluster, [spot for spot in nodes.weak if spot.level not in beyond])
    whole = node.gpus_per_node or per_node
    return LoadedCluster(
        cluster=cluster,
        sources=_used(named, cluster),
        warnings=taken,
        leaves_idle=count > per_node and per_node < whole,
    )


def _networked(nodes: _Nodes, flags: Flags) -> tuple[_Nodes, tuple[str, ...]]:
    """`nodes`, joined over TCP where their profile knows no network but `--inter-bw` says how fast
    it is, and what was taken for that."""
    if flags.inter_bandwidth_bytes_per_second is None or _have_network(nodes):
        return nodes, ()
    relative, _, name = SOCKETS.partition(":")
    sockets = next(one for one in load_node(relative).levels if one.level.name == name)
    said = (
        f"{nodes.name} knows no network between its nodes: --inter-bw is taken as Ethernet over "
        f"TCP, of which NCCL reaches {format_percent(sockets.level.bandwidth_fraction)} (another "
        "network is declared in a cluster file: docs/guides/declare-a-cluster.md)"
    )
    network = Network(transport="ethernet", evidence="flag --inter-bw")
    return replace(nodes, levels=(*nodes.levels, sockets), network=network), (said,)


def _have_network(nodes: _Nodes) -> bool:
    """Whether a level joins nodes, be it part of them."""
    per_node = nodes.node.gpus_per_node or 0
    return any(
        level.joins == "cluster"
        or level.domain_nodes is not None
        or (level.domain_gpus or 0) > per_node
        for level in nodes.levels
    )


def _require_one_word_on_gpudirect(cluster: Cluster) -> None:
    """Refuse a `[network]` whose adapters read device memory where those of their level do not, or
    the other way round: the level is priced, and nobody would see the other word."""
    network = cluster.network
    if network is None or network.gpudirect is None or network.transport not in VERBS:
        return
    between = (level for level in cluster.levels if cluster.joins_nodes(level))
    adapters = next((level for level in between if level.name != "nvlink"), None)
    if adapters is not None and adapters.gpudirect is not (network.gpudirect != "none"):
        raise SpecError(
            f"{cluster.name}: [network] says gpudirect {network.gpudirect}, and level "
            f"{adapters.name} says gpudirect = {str(adapters.gpudirect).lower()}: say the same in "
            "both"
        )


def _device(nodes: _Nodes, asked: str | None) -> DeviceProfile:
    if asked is not None:
        return load_device(asked)
    return nodes.node.own_device or load_device(nodes.node.device, beside=nodes.folder)


def _mixed(profile: ClusterProfile, folder: Path | None, flags: Flags) -> LoadedCluster:
    """A cluster of several types of nodes: all wait for the slowest of each part."""
    if flags != Flags(gpus=flags.gpus):
        raise SpecError(
            f"{profile.name} has several types of nodes: only --gpus goes with it; change the file "
            "for the rest"
        )
    named = [_nodes_of(profile, kind, folder) for kind in profile.node_types]
    _require_owned(profile.weak, named, where=profile.name)
    sizes = [nodes.node.gpus_per_node for nodes in named]
    per_node = min(size for size in sizes if size is not None) if None not in sizes else None
    if per_node is None:
        raise SpecError(
            f"{profile.name}: nodes in a cluster of several types have a fixed size: name node "
            "profiles that say gpus_per_node"
        )
    total = per_node * sum(kind.num_nodes for kind in profile.node_types)
    if flags.gpus is not None and flags.gpus != total:
        raise SpecError(
            f"{profile.name} has {total} GPUs to use in nodes of several types: leave out --gpus, "
            "change the numbers in the file, or plan for one type by its profile"
        )
    parts, whole = [], []
    for nodes, kind in zip(named, profile.node_types, strict=True):
        alone = Flags(gpus=kind.num_nodes * (nodes.node.gpus_per_node or 1))
        own = _equal_nodes(nodes, profiled=None, flags=alone)
        parts.append(own.cluster)
        together = _equal_nodes(
            nodes, profiled=None, flags=Flags(gpus=total, gpus_per_node=per_node)
        )
        whole.append(
            UniformCluster(cluster=together.cluster, node=kind.node, num_nodes=kind.num_nodes)
        )
    cluster, warnings = slowest_of(whole)
    sources = (("cluster.gpus", f"nodes of {profile.name}"), *profile.sources)
    return LoadedCluster(
        cluster=cluster,
        sources=_used(dict(sources), cluster),
        parts=tuple(parts),
        warnings=warnings,
    )


def _require_owned(weak: Sequence[WeakSpot], types: Sequence[_Nodes], *, where: str) -> None:
    for spot in weak:
        if not any(spot in nodes.weak for nodes in types):
            raise SpecError(
                f"{where}: the weak spot of {', '.join(spot.nodes)} is of none of its types of "
                "nodes: name a level that one of them has, and nodes among their names"
            )


def _warned(loaded: LoadedCluster) -> LoadedCluster:
    """`loaded` with a sentence on each of its weak spots."""
    said = tuple(f"{compress_host_list(spot.nodes)}: {spot.text}" for spot in loaded.cluster.weak)
    return replace(loaded, warnings=(*loaded.warnings, *said))


def _gpu_count(node: NodeProfile, *, asked: int | None, profiled: int | None) -> int:
    """GPUs to use: as asked, as the cluster profile says, or one node."""
    count = next((n for n in (asked, profiled, node.gpus_per_node) if n is not None), None)
    if count is None:
        raise SpecError(f"{node.name} has no fixed size: say how many processes, such as --gpus 4")
    if not 1 <= count <= _MAX_GPUS:
        raise SpecError(f"--gpus must lie between 1 and {_MAX_GPUS}, not {short(count)}")
    return count


def _gpus_per_node(node: NodeProfile, *, gpus: int, asked: int | None) -> int:
    """GPUs used on each node: as asked, else whole nodes, or a part of a single one."""
    most = node.gpus_per_node
    if asked is None:
        return gpus if most is None or gpus <= most else _equal_share(gpus, most=most)
    if not 1 <= asked <= gpus:
        raise SpecError(
            f"--gpus-per-node must lie between 1 and the {gpus} GPUs in all, not {short(asked)}"
        )
    if most is not None and asked > most:
        raise SpecError(f"a {node.name} node has {most} GPUs: use --gpus-per-node {most} or less")
    return asked


def _equal_share(gpus: int, *, most: int) -> int:
    """As many GPUs of each of the fewest nodes that hold them: 14 are 7 on each of two nodes of 8.
    Where they do not split so, whole nodes, and the count is refused."""
    nodes = -(-gpus // most)
    return gpus // nodes if gpus % nodes == 0 else most


def with_intra(cluster: Cluster, bytes_per_second: float) -> Cluster:
    """With links inside of a node of so much, per GPU and one direction."""
    if cluster.gpus_per_node == 1:
        raise SpecError("--intra-bw has no use with one GPU a node: leave it out")
    inside = replace(cluster.levels[0], ports=1, port_bandwidth_bytes_per_second=bytes_per_second)
    return replace(cluster, levels=(inside, *cluster.levels[1:]))


def with_inter(cluster: Cluster, bytes_per_second: float) -> Cluster:
    """With links between nodes of so much, per GPU and one direction."""
    if cluster.nodes == 1:
        raise SpecError(
            f"--inter-bw has no use on one node of {cluster.gpus_per_node} GPUs: leave it out, "
            "or ask for more --gpus"
        )
    *inner, outer = cluster.levels
    below = inner[-1].domain_gpus if inner else 1
    if below > cluster.gpus_per_node:
        raise SpecError(
            f"--inter-bw names one network between nodes, but {cluster.name} joins them by "
            f"{' and '.join(level.name for level in cluster.levels)}: change the profile instead"
        )
    outer = replace(
        outer, ports=cluster.gpus_per_node, port_bandwidth_bytes_per_second=bytes_per_second
    )
    return replace(cluster, levels=(*inner, outer))


def _level_sources(level: Level, source: str) -> dict[str, str]:
    prefix = f"cluster.levels.{level.name}."
    return {f"{prefix}ports": source, f"{prefix}port_bandwidth_bytes_per_second": source}


def _used(named: dict[str, str], cluster: Cluster) -> Sources:
    """Sources without those of levels that a single node does not reach."""
    reached = tuple(f"cluster.levels.{level.name}." for level in cluster.levels)
    return tuple(
        (field, source)
        for field, source in named.items()
        if not field.startswith("cluster.levels.") or field.startswith(reached)
    )
