"""PCI: where devices hang in the tree of bridges, how near two of them are, and their links."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fsdpplan.spec.machine import Machine
from fsdpplan.spec.nodes import PciPath
from fsdpplan.topology.read.reading import whole_number
from fsdpplan.topology.read.recording import Recording

Way = tuple[str, ...]
"""Way down to a device: host bridge (`pci0000:15`), root port, switch ports, the device itself."""

NEAREST_FIRST: tuple[PciPath, ...] = ("pix", "pxb", "phb", "node", "sys")

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""Transfers per second of a lane in 1e9, as the kernel writes them, and their PCIe generation."""
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """The link of a device to the port above it; None for what the kernel does not know."""

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None


def pci_link_of(recording: Recording, folder: str) -> PciLink:
    """The link that the files `current_link_speed` and so on in `folder` describe."""

    def generation(name: str) -> int | None:
        match = re.match(r"([0-9.]+) GT/s", recording.text(f"{folder}/{name}") or "")
        return _GENERATIONS.get(match[1]) if match else None

    def width(name: str) -> int | None:
        lanes = whole_number(recording.text(f"{folder}/{name}"))
        return lanes if lanes in _WIDTHS else None

    return PciLink(
        generation=generation("current_link_speed"),
        width=width("current_link_width"),
        max_generation=generation("max_link_speed"),
        max_width=width("max_link_width"),
    )


def way_in(path: str | None) -> Way | None:
    """The way to the last PCI device in the real `path` of a device under /sys/devices.

    Whatever stands before the host bridge (ACPI nodes, VMBus) and behind the device (virtio0,
    net/eth0) is left out.
    """
    parts = (path or "").lower().split("/")
    starts = [index for index, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    if not starts:
        return None
    way = [parts[starts[-1]]]
    for part in parts[starts[-1] + 1 :]:
        if not _ADDRESS.fullmatch(part):
            break
        way.append(part)
    return tuple(way) if len(way) > 1 else None


def bus_id_in(path: str | None) -> str | None:
    """PCI address of the last PCI device in a real `path`."""
    way = way_in(path)
    return way[-1] if way else None


def pci_paths_of(recording: Recording, bus_ids: Collection[str]) -> tuple[tuple[str, Way], ...]:
    """The way to each device of `bus_ids` that the recording has a link for."""
    found: dict[str, Way] = {}
    for bus_id in bus_ids:
        way = way_in(recording.link(f"/sys/bus/pci/devices/{bus_id}"))
        if way is not None and way[-1] == bus_id:
            found[bus_id] = way
    for name in recording.children("/sys/class/infiniband"):
        way = way_in(recording.link(f"/sys/class/infiniband/{name}/device"))
        if way is not None and way[-1] in bus_ids:
            found.setdefault(way[-1], way)
    return tuple(sorted(found.items()))


def pci_path_between(
    first: Way, second: Way, *, numa_node: int | None, other_numa_node: int | None
) -> PciPath | None:
    """How near two devices are; None where their NUMA nodes would tell and are unknown.

    Below one host bridge the bridges on the way are counted: two ports of one switch are `pix`,
    more are `pxb`. NCCL walks the same tree two bridges (one switch) at a time; it calls `node`
    `phb`, since all host bridges of a NUMA node are one to it, and joins the two levels that
    Broadcom's switches show (`ncclTopoFlattenBcmSwitches`), which this does not.
    Source: NCCL 2.30.7 src/graph/paths.cc, ncclTopoSetPaths, and src/graph/xml.cc,
    ncclTopoGetXmlFromSys; the names are those of `nvidia-smi topo -m`.
    """
    if first[0] != second[0]:
        if numa_node is None or other_numa_node is None:
            return None
        return "node" if numa_node == other_numa_node else "sys"
    shared = sum(1 for _ in _shared(first, second))
    if shared == 1:
        return "phb"
    bridges = max(len(first), len(second)) - shared - 1
    return "pix" if bridges <= 1 else "pxb"


def _shared(first: Way, second: Way) -> Iterator[str]:
    """What two ways have in common, from the top."""
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


def path_in(machine: Machine, bus_id: str, other_bus_id: str) -> PciPath | None:
    """How near two GPUs or adapters of `machine` are, by their PCI addresses."""
    ways = dict(machine.pci_paths)
    if bus_id not in ways or other_bus_id not in ways:
        return None
    nodes = {gpu.bus_id: gpu.numa_node for gpu in machine.gpus}
    nodes |= {nic.bus_id: nic.numa_node for nic in machine.nics}
    # A host without a second NUMA node does not say which one its devices are at.
    only = 0 if machine.host.numa_nodes == 1 else None
    node, other = nodes.get(bus_id), nodes.get(other_bus_id)
    return pci_path_between(
        ways[bus_id],
        ways[other_bus_id],
        numa_node=only if node is None else node,
        other_numa_node=only if other is None else other,
    )
