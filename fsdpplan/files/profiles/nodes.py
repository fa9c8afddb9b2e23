"""Node and cluster profiles: which devices, joined by which levels of links; their `[network]` and
`[[weak]]` tables. Where a job has nodes of several types, every part runs at the pace of its
slowest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.devices import DEVICE_KEYS, DeviceProfile, read_device
from fsdpplan.files.profiles.levels import LevelProfile, check_levels, read_level
from fsdpplan.files.profiles.numbers import Relatives, SourcedNumbers, Sources, checked, texts
from fsdpplan.files.table import Table
from fsdpplan.spec.cluster import Cluster, Device, Evidence, Level, WeakSpot
from fsdpplan.spec.nodes import Network, expand_host_list
from fsdpplan.spec.weak import weak_nodes, weakened, without_nodes
from fsdpplan.units import format_bandwidth, format_gib

_EVIDENCE = "evidence"


def read_network(table: Table, sources: dict[str, str]) -> tuple[Network | None, Sources]:
    """The network of a profile's table, if it has one, and the source of each field."""
    if "network" not in table.values:
        return None, ()
    numbers = SourcedNumbers(table.table("network"), sources, prefix="cluster.network.")
    names = [field.name for field in fields(Network) if field.name != _EVIDENCE]
    numbers.table.refuse_unknown(names)
    hints = get_type_hints(Network)
    values: dict[str, Any] = {
        name: _value(numbers, name, hints[name]) for name in names if name in numbers.table.values
    }
    if "transport" not in values:
        raise SpecError(f"{numbers.table.field('transport')} is missing; add it")
    evidence = dict(numbers.used)["cluster.network.transport"]
    network = checked(numbers.table, lambda: Network(evidence=evidence, **values))
    return network, tuple(numbers.used)


def _value(numbers: SourcedNumbers, name: str, kind: Any) -> Any:
    """One field, read as its type says."""
    if kind in (bool, bool | None):
        return numbers.flag(name)
    if kind == int | None:
        return int(numbers.integer(name, lowest=0))
    if kind == tuple[str, ...]:
        return numbers.texts(name)
    if kind == str | None:
        return numbers.text(name)
    choices = [arm for arm in getattr(kind, "__args__", ()) if arm is not type(None)]
    plain = [word for arm in choices for word in getattr(arm, "__args__", (arm,))]
    return numbers.choice(name, plain)


def read_weak(table: Table, sources: dict[str, str]) -> tuple[tuple[WeakSpot, ...], Sources]:
    """What holds nodes back, from the `[[weak]]` tables."""
    rows = table.values.get("weak", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise table.wrong("weak", "[[weak]] tables")
    spots, used = [], []
    for index, row in enumerate(rows):
        row_table = Table(where=table.where, values=row, prefix=f"weak[{index}].")
        spot, source = _weak_spot(row_table, sources)
        spots.append(spot)
        used.append((f"cluster.weak.{index}", source))
    return tuple(spots), tuple(used)


def _weak_spot(table: Table, sources: dict[str, str]) -> tuple[WeakSpot, str]:
    table.refuse_unknown(("nodes", "level", "remaining_fraction", "text"))
    nodes = table.require("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise table.wrong("nodes", "a list of names of nodes")
    numbers = SourcedNumbers(table, sources, prefix="")
    fraction = float(numbers.read("remaining_fraction"))
    level = table.text("level") if "level" in table.values else None
    spot = checked(
        table,
        lambda: WeakSpot(
            nodes=tuple(name for node in nodes for name in expand_host_list(node)),
            level=level,
            remaining_fraction=fraction,
            text=table.text("text"),
        ),
    )
    return spot, numbers.used[0][1]


HOST_RATE = "host_memory_bytes_per_second"
HOST_MEMORY = "host_memory_bytes"
NODE_KEYS = ("device", "gpus_per_node", HOST_MEMORY, HOST_RATE, "levels", "network", "weak")
CLUSTER_KEYS = ("node", "gpus", "node_types", "levels", "network", "weak")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """A node type: its device and the links inside it and out of it."""

    name: str
    device: str
    """Name of the device's profile, or of the device in the file itself."""
    own_device: DeviceProfile | None
    """The device where the file holds it."""
    gpus_per_node: int | None
    """None: any number (processes of one machine)."""
    host_memory_bytes: int | None = None
    """None: not known, as below."""
    host_memory_bytes_per_second: float | None = None
    levels: tuple[LevelProfile, ...]
    """Innermost first."""
    network: Network | None
    weak: tuple[WeakSpot, ...]
    sources: Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Nodes of one type in a cluster of several."""

    node: str
    """Name of the node's profile."""
    num_nodes: int
    names: tuple[str, ...]
    """Names of these nodes; empty: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """A number of GPUs in nodes of one type or of several, and what joins the nodes."""

    name: str
    node_types: tuple[NodeType, ...]
    """One for a cluster of equal nodes, whose number of nodes then follows from `gpus`."""
    gpus: int | None
    """None: as many as the nodes of its types have."""
    levels: tuple[LevelProfile, ...]
    """Of the network between nodes; empty: as the node's profile has it."""
    network: Network | None
    weak: tuple[WeakSpot, ...]
    sources: Sources


def read_node(table: Table, sources: dict[str, str], relatives: Relatives) -> NodeProfile:
    """A node type, whose keys are checked to be `NODE_KEYS` and a header."""
    size = SourcedNumbers(table, sources, prefix="cluster.")
    any_size = table.require("gpus_per_node") == "any"
    gpus_per_node = None if any_size else size.integer("gpus_per_node")
    host_memory = size.integer(HOST_MEMORY) if HOST_MEMORY in table.values else None
    host_rate = size.read(HOST_RATE) if HOST_RATE in table.values else None
    own_device = _own_device(table, sources, relatives)
    levels, level_sources = _levels(table, sources, relatives)
    check_levels(levels, gpus_per_node=gpus_per_node, where=table.where)
    network, network_sources = read_network(table, sources)
    weak, weak_sources = read_weak(table, sources)
    device_sources = () if own_device is None else own_device.sources
    return NodeProfile(
        name=table.text("name"),
        device=table.text("device") if own_device is None else own_device.device.name,
        own_device=own_device,
        gpus_per_node=gpus_per_node,
        host_memory_bytes=host_memory,
        host_memory_bytes_per_second=host_rate,
        levels=levels,
        network=network,
        weak=weak,
        sources=(*device_sources, *size.used, *level_sources, *network_sources, *weak_sources),
    )


def _own_device(
    table: Table, sources: dict[str, str], relatives: Relatives
) -> DeviceProfile | None:
    """The device that the file itself describes, or None where it names one."""
    if not isinstance(table.require("device"), dict):
        return None
    device = table.table("device")
    device.refuse_unknown(DEVICE_KEYS)
    return read_device(device, sources, relatives)


def _levels(
    table: Table, sources: dict[str, str], relatives: Relatives
) -> tuple[tuple[LevelProfile, ...], Sources]:
    rows = table.require("levels")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise table.wrong("levels", "[[levels]] tables")
    levels: list[LevelProfile] = []
    used: list[tuple[str, str]] = []
    for index, row in enumerate(rows):
        row_table = Table(where=table.where, values=row, prefix=f"levels[{index}].")
        level, level_sources = read_level(row_table, sources, relatives)
        levels.append(level)
        used += level_sources
    return tuple(levels), tuple(used)


def read_cluster(table: Table, sources: dict[str, str], relatives: Relatives) -> ClusterProfile:
    """A cluster, whose keys are checked to be `CLUSTER_KEYS` and a header."""
    numbers = SourcedNumbers(table, sources, prefix="cluster.")
    node_types = _node_types(table, sources)
    has_levels = "levels" in table.values
    levels, level_sources = _levels(table, sources, relatives) if has_levels else ((), ())
    if any(level.joins == "node" for level in levels):
        raise SpecError(
            f"{table.where}: the levels of a cluster join nodes; write what joins the GPUs of a "
            "node into the node's profile"
        )
    gpus = numbers.integer("gpus") if "gpus" in table.values else None
    if gpus is None and "node" in table.values:
        raise SpecError(f"{table.field('gpus')} is missing; add it")
    network, network_sources = read_network(table, sources)
    weak, weak_sources = read_weak(table, sources)
    return ClusterProfile(
        name=table.text("name"),
        node_types=node_types,
        gpus=gpus,
        levels=levels,
        network=network,
        weak=weak,
        sources=(*numbers.used, *level_sources, *network_sources, *weak_sources),
    )


def _node_types(table: Table, sources: dict[str, str]) -> tuple[NodeType, ...]:
    """The types of nodes: `node = "name"`, or several `[[node_types]]`."""
    if ("node" in table.values) == ("node_types" in table.values):
        raise SpecError(
            f'{table.where}: a cluster must name its nodes once: node = "profile" with gpus, or '
            "[[node_types]] with a number of nodes each"
        )
    if "node" in table.values:
        return (NodeType(node=table.text("node"), num_nodes=0, names=()),)
    rows = table.values["node_types"]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise table.wrong("node_types", "[[node_types]] tables")
    types = []
    for index, row in enumerate(rows):
        row_table = Table(where=table.where, values=row, prefix=f"node_types[{index}].")
        row_table.refuse_unknown(("node", "num_nodes", "names"))
        count = SourcedNumbers(row_table, sources, prefix="").integer("num_nodes")
        names = texts(row_table, "names") if "names" in row else ()
        if names and len(set(names)) != count:
            raise row_table.wrong("names", f"the names of its {count} nodes")
        types.append(NodeType(node=row_table.text("node"), num_nodes=count, names=names))
    return tuple(types)


_WEAKEST: tuple[Evidence, ...] = ("datasheet", "fitted", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCluster:
    """The whole cluster as it would be with nodes of one type only."""

    cluster: Cluster
    node: str
    """Profile of the nodes."""
    num_nodes: int
    """Nodes of this type in the real cluster."""


def slowest_of(parts: Sequence[UniformCluster]) -> tuple[Cluster, tuple[str, ...]]:
    """One cluster at the pace of the slowest type in each respect, and sentences on who that is.

    Ranks have equal shares of the work, so that all wait for the slowest device, all fit into the
    smallest memory, and a ring is as fast as its slowest link. Raises SpecError where the types do
    not have the same levels of links.
    """
    counts = {len(part.cluster.levels) for part in parts}
    if len(counts) > 1:
        raise SpecError(
            "nodes of a mixed cluster have the same number of levels of links, not "
            f"{', '.join(f'{len(p.cluster.levels)} ({p.node})' for p in parts)}: say in the file, "
            "by [[levels]], what joins them"
        )
    healthy = [
        replace(part, cluster=without_nodes(part.cluster, weak_nodes(part.cluster)))
        for part in parts
    ]
    slow = min(healthy, key=lambda part: _rate(part.cluster.device))
    levels = tuple(
        min(same, key=_gpu_bandwidth)
        for same in zip(*(part.cluster.levels for part in healthy), strict=True)
    )
    rates = [part.cluster.host_memory_bytes_per_second for part in healthy]
    sizes = [part.cluster.host_memory_bytes for part in healthy]
    cluster = replace(
        slow.cluster,
        device=_slowest_device(slow, healthy),
        levels=levels,
        network=None,
        host_memory_bytes_per_second=min((each for each in rates if each), default=None),
        host_memory_bytes=min((each for each in sizes if each), default=None),
    )
    spots = [
        spot
        for part, whole in zip(parts, healthy, strict=True)
        for spot in _spots(part.cluster.weak, whole.cluster, cluster)
    ]
    return weakened(cluster, _weakest(spots)), tuple(_sentences(healthy, slow, cluster))


def _spots(weak: Sequence[WeakSpot], own: Cluster, mixed: Cluster) -> Iterator[WeakSpot]:
    """`weak` of the nodes that are healthy as `own`, as shares of what `mixed` has; none of what
    still is as fast as that."""
    for spot in weak:
        left, name = spot.remaining_fraction, spot.level
        if name is None:
            left *= _rate(own.device) / _rate(mixed.device)
        else:
            place = [level.name for level in own.levels].index(name)
            left *= _gpu_bandwidth(own.levels[place]) / _gpu_bandwidth(mixed.levels[place])
            name = mixed.levels[place].name
        if left < 1:
            yield replace(spot, level=name, remaining_fraction=left)


def _weakest(spots: Sequence[WeakSpot]) -> list[WeakSpot]:
    """Each once: one that may be of several types of nodes is taken for the slowest's."""
    least: dict[WeakSpot, WeakSpot] = {}
    for spot in spots:
        key = replace(spot, remaining_fraction=1.0)
        known = least.get(key)
        if known is None or spot.remaining_fraction < known.remaining_fraction:
            least[key] = spot
    return list(least.values())


def _rate(device: Device) -> float:
    """FLOP/s of large matmuls in training."""
    return (
        device.peak_bf16_flops_per_second
        * device.fit.matmul_fraction
        * device.fit.sustained_fraction
    )


def _gpu_bandwidth(level: Level) -> float:
    return level.ports * level.port_bandwidth_bytes_per_second * level.bandwidth_fraction


def _slowest_device(slow: UniformCluster, parts: Sequence[UniformCluster]) -> Device:
    devices = [part.cluster.device for part in parts]
    names = dict.fromkeys(device.name for device in devices)
    return replace(
        slow.cluster.device,
        name="+".join(names),
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bandwidth_bytes_per_second=min(
            device.memory_bandwidth_bytes_per_second for device in devices
        ),
        host_link_bytes_per_second=min(device.host_link_bytes_per_second for device in devices),
        peak_fp8_flops_per_second=None
        if any(device.peak_fp8_flops_per_second is None for device in devices)
        else slow.cluster.device.peak_fp8_flops_per_second,
        evidence=min((device.evidence for device in devices), key=_WEAKEST.index),
        compute_capability=_oldest([device.compute_capability for device in devices]),
        skypilot_name=slow.cluster.device.skypilot_name if len(names) == 1 else None,
    )


def _oldest(capabilities: Sequence[str | None]) -> str | None:
    """The least of them; None where one is not known."""
    known = [one for one in capabilities if one is not None]
    if len(known) < len(capabilities):
        return None
    return min(known, key=lambda one: tuple(map(int, one.split("."))))


def _sentences(
    parts: Sequence[UniformCluster], slow: UniformCluster, cluster: Cluster
) -> list[str]:
    total = sum(part.num_nodes for part in parts)
    said = [
        f"{slow.num_nodes} of {total} nodes are {slow.node}: every step waits for their "
        f"{slow.cluster.device.name}"
    ]
    small = min(parts, key=lambda part: part.cluster.device.memory_bytes)
    if small is not slow:
        memory = format_gib(small.cluster.device.memory_bytes)
        said.append(f"every rank must fit into the {memory} of {small.node}")
    for index, level in enumerate(cluster.levels):
        owner = next(part for part in parts if part.cluster.levels[index] == level)
        bandwidths = {_gpu_bandwidth(part.cluster.levels[index]) for part in parts}
        if len(bandwidths) > 1:
            one = format_bandwidth(level.port_bandwidth_bytes_per_second)
            said.append(f"the {level.name} of {owner.node} ({level.ports} x {one}) sets the ring")
    return said
