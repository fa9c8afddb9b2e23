"""Node and cluster profiles: which devices, joined by which levels of links.

The `[network]` and `[[weak]]` tables of node and cluster profiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.devices import DEVICE_KEYS, DeviceProfile, read_device
from fsdpplan.files.profiles.levels import LevelProfile, check_levels, read_level
from fsdpplan.files.profiles.numbers import Relatives, SourcedNumbers, Sources, checked, texts
from fsdpplan.files.table import Table
from fsdpplan.spec.cluster import WeakSpot
from fsdpplan.spec.host_list import expand_host_list
from fsdpplan.spec.network import Network

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


HOST_MEMORY = "host_memory_bytes_per_second"
NODE_KEYS = ("device", "gpus_per_node", HOST_MEMORY, "levels", "network", "weak")
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
    host_memory_bytes_per_second: float | None = None
    """None: not known."""
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
    host_memory = size.read(HOST_MEMORY) if HOST_MEMORY in table.values else None
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
        host_memory_bytes_per_second=host_memory,
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
