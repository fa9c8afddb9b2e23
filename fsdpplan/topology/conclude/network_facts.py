"""Network facts: what a launch must know of the nodes' network, out of what was found on them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from fsdpplan.spec.machine import Interface, Machine, Nic
from fsdpplan.spec.nodes import GpuDirect, Network, PciPath, Transport
from fsdpplan.spec.topology import LevelKind, Topology
from fsdpplan.topology.conclude.network_level import (
    closed_to_adapters,
    host_interface,
    tcpx_interfaces,
)
from fsdpplan.topology.conclude.rails import fabric_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]*")
_VIRTUAL = re.compile(r"(docker|virbr|br-|veth|cni|flannel|cali|tunl|kube|lxc|podman|tailscale|wg)")
"""Interfaces that containers, virtual machines and tunnels make for themselves."""
_FARTHEST_LAST: tuple[PciPath, ...] = ("pix", "pxb", "phb", "node", "sys")
_NVLS_CAPABILITY = (9, 0)
"""Switches beside GPUs of this generation and later reduce (NCCL user guide, NCCL_NVLS_ENABLE)."""


def network_of(
    machine: Machine, topology: Topology, *, others: Sequence[Machine] = ()
) -> Network | None:
    """The network of `machine` and `others`; None where none was found.

    Names are those that suit all hosts: the adapters that most have in their compute fabric, the
    GID entry that all ports share, the interface whose network all are in.
    """
    transport = _transport(machine, topology)
    if transport is None:
        return None
    machines = (machine, *others)
    hcas, differ = _hcas(machines) if transport in ("infiniband", "roce", "gib") else ((), False)
    socket = _socket_interface(machines)
    return Network(
        transport=transport,
        evidence=_evidence(machines),
        hcas=hcas,
        hcas_left_out=_left_out(machine, hcas) if hcas else (),
        hcas_differ=differ,
        gid_index=_gid_index(machines) if transport in ("roce", "gib") else None,
        socket_interface=socket,
        socket_interfaces_left_out=_dead_ends(machines, socket),
        gpudirect=_gpudirect(machines),
        gpudirect_path=_farthest(topology),
        nvlink_switch=_nvlink_switch(machine, topology),
        provider=machine.cloud.provider if machine.cloud is not None else None,
        instance_type=machine.cloud.instance_type if machine.cloud is not None else None,
        net_plugins=machine.software.net_plugins,
        env_profiles=machine.software.env_profiles,
        nccl_version=machine.software.nccl,
    )


def _transport(machine: Machine, topology: Topology) -> Transport | None:
    """What carries data between nodes; plain sockets need an interface that leads somewhere."""
    kinds: set[LevelKind] = {level.kind for level in topology.levels}
    google = machine.cloud is not None and machine.cloud.provider == "gcp"
    files = " ".join((*machine.software.net_plugins, *machine.software.env_profiles))
    if "infiniband" in kinds:
        return "infiniband"
    if "roce" in kinds:
        return "gib" if google and "/gib/" in files else "roce"
    if "efa" in kinds:
        return "efa"
    if tcpx_interfaces(machine):
        return "tcpxo" if "tcpxo" in files or "fastrak" in files else "tcpx"
    return "ethernet" if machine.gpus and host_interface(machine) is not None else None


def _gpudirect(machines: Sequence[Machine]) -> GpuDirect | None:
    """How adapters of all hosts may read device memory: one where they cannot holds the others
    back, as the common levels are priced."""
    ways = [
        "none" if closed_to_adapters(machine) else machine.host.gpudirect for machine in machines
    ]
    return min(ways, key=lambda way: way not in (None, "none"))


def _evidence(machines: Sequence[Machine]) -> str:
    first = machines[0].host.name
    more = f" and {len(machines) - 1} more" if len(machines) > 1 else ""
    return f"found on {first}{more} by fsdpplan detect"


def _hcas(machines: Sequence[Machine]) -> tuple[tuple[str, ...], bool]:
    """Ports of the compute fabric by most hosts, and whether some host has no such adapters.

    A host on which one of them is down still counts as having it; the check before a job says so.
    """
    lists = Counter(hcas for machine in machines if (hcas := _own_hcas(machine)))
    if not lists:
        return (), False
    usual = max(lists, key=lambda hcas: (lists[hcas], len(hcas)))
    ports = [{_port_name(machine, nic) for nic in machine.nics} for machine in machines]
    if all(set(usual) <= names for names in ports):
        return usual, False
    return (), True


def _own_hcas(machine: Machine) -> tuple[str, ...]:
    names = [_port_name(machine, nic) for nic in fabric_of(machine).ports]
    return tuple(name for name in names if _NAME.fullmatch(name))


def _port_name(machine: Machine, nic: Nic) -> str:
    """`mlx5_0`, with its port where the adapter has several."""
    several = sum(other.name == nic.name for other in machine.nics) > 1
    return f"{nic.name}:{nic.port}" if several else nic.name


def _left_out(machine: Machine, hcas: Sequence[str]) -> tuple[str, ...]:
    names = [_port_name(machine, nic) for nic in machine.nics]
    return tuple(name for name in names if name not in hcas and _NAME.fullmatch(name))


def _gid_index(machines: Sequence[Machine]) -> int | None:
    """The first entry that is RoCE v2 with an IPv4 address on every port of the fabric."""
    common: set[int] | None = None
    for machine in machines:
        for nic in fabric_of(machine).ports:
            entries = {
                gid.index
                for gid in nic.gids
                if gid.kind == "RoCE v2" and gid.gid.startswith("::ffff:")
            }
            common = entries if common is None else common & entries
    return min(common) if common else None


def _is_up(interface: Interface) -> bool:
    """It has an address, and nothing says that it is down."""
    return (
        interface.up is not False
        and bool(interface.networks)
        and _NAME.fullmatch(interface.name) is not None
    )


def _socket_interface(machines: Sequence[Machine]) -> str | None:
    """The interface by which hosts reach each other, under one name on all of them.

    With several hosts it is one in whose network all are, else the one that has the default route
    on all; a single host only has the latter to go by.
    """
    first = machines[0]
    usable = [each for each in first.interfaces if _is_up(each) and not _VIRTUAL.match(each.name)]
    shared = [each for each in usable if all(_leads_to(each, other) for other in machines[1:])]
    routed = [
        each
        for each in usable
        if each.default_route and all(_has_route(each.name, other) for other in machines[1:])
    ]
    candidates = (shared or routed) if len(machines) > 1 else routed
    best = max(
        candidates,
        key=lambda each: (each.default_route, each.speed_bytes_per_second or 0.0),
        default=None,
    )
    return None if best is None else best.name


def _dead_ends(machines: Sequence[Machine], chosen: str | None) -> tuple[str, ...]:
    """Interfaces of the first host that do not lead to the others; on one host alone, those that
    containers and virtual machines made."""
    first, *others = machines
    return tuple(
        each.name
        for each in first.interfaces
        if _is_up(each)
        and each.name != chosen
        and (_VIRTUAL.match(each.name) or not all(_leads_to(each, other) for other in others))
    )


def _leads_to(interface: Interface, other: Machine) -> bool:
    """The other host is in the same network by an interface of the same name."""
    return any(
        each.name == interface.name and set(each.networks) & set(interface.networks)
        for each in other.interfaces
        if _is_up(each)
    )


def _has_route(name: str, other: Machine) -> bool:
    return any(
        each.name == name and each.default_route and _is_up(each) for each in other.interfaces
    )


def _farthest(topology: Topology) -> PciPath | None:
    """The farthest way between a GPU and a port that serves it; None where one is unknown."""
    known = [rail.path for rail in topology.rails if rail.path is not None]
    if not known or len(known) < len(topology.rails):
        return None
    return max(known, key=_FARTHEST_LAST.index)


def _nvlink_switch(machine: Machine, topology: Topology) -> bool | None:
    """All GPUs hang on switches that can reduce."""
    if any(island.kind != "nvswitch" for island in topology.islands):
        return False
    capabilities = [gpu.compute_capability for gpu in machine.gpus]
    known = [
        tuple(int(part) for part in each.split("."))
        for each in capabilities
        if each is not None and re.fullmatch(r"[0-9]+\.[0-9]+", each)
    ]
    if not known or len(known) < len(capabilities):
        return None
    return min(known) >= _NVLS_CAPABILITY
