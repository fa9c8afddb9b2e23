"""Rails: which port of the compute fabric serves which GPU.

A host has ports for other purposes, too: storage, management, the host's own network. Those of the
compute fabric are told in three steps.

1. Ports are of one kind when they are equals by their link layer, chip (the first number of an
   mlx5's firmware), PCIe link, function and port number. The fabric's link layer is that of the
   kind which shares a PCIe switch with the most GPUs, and then of the one with the most bandwidth
   in all.
2. Every GPU names the ports nearest to it, up or down, among those of that link layer which are of
   that kind or share a switch with a GPU. A port that no GPU names is left out: on a DGX H100 the
   storage ports are equals of the others in everything but their place. A GPU without a port below
   its own switch names none where one of the nearest is another GPU's.
3. Each GPU is served by the nearest named ports that are up; GPUs and ports at one distance are
   shared out evenly.

A port of which no way to a GPU is known can be named by nobody. Where that holds for all of them
(some virtual machines show no tree), all ports of the kind belong to the fabric, but no more than
one for each GPU, since nothing tells storage from it.

Where few GPUs have fewer ports below their own switches than all others, ports have gone from the
bus: nobody builds hosts like that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpplan.spec.machine import Gpu, Machine, Nic
from fsdpplan.spec.nodes import PciPath
from fsdpplan.spec.topology import Rail
from fsdpplan.topology.read.lanes import nic_link_bytes_per_second, pcie_bytes_per_second
from fsdpplan.topology.read.pci import NEAREST_FIRST, path_in

_SWITCHED = ("pix", "pxb")
"""Ways that stay below one PCIe host bridge's switches."""

_Kind = tuple[object, ...]
_Paths = Mapping[tuple[int, str, int], PciPath]
"""(GPU, adapter, port) -> way between them, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Ports of the compute fabric of one host, and all others."""

    ports: tuple[Nic, ...]
    """Up, with a known rate."""
    silent: tuple[Nic, ...]
    """Those that belong to it but carry nothing: down, not yet brought up, or of unknown rate."""
    left_out: tuple[Nic, ...]
    placed: bool
    """The way between ports and GPUs is known."""
    lacking: tuple[int, ...]
    """GPUs that have fewer ports below their switches than all others."""
    missing: int
    """How many ports these lack: gone from the bus."""


def fabric_of(machine: Machine) -> Fabric:
    """Which ports belong to the compute fabric: see the module."""
    paths = _paths(machine)
    primary = _primary_kind(machine, paths)
    candidates = [
        nic
        for nic in machine.nics
        if primary is not None
        and nic.link_layer == primary[0]
        and (_kind(nic) == primary or _near_gpus(machine, nic, paths))
    ]
    named = _named(machine, candidates, paths)
    members = [
        nic for nic in candidates if (_key(nic) in named if named else _kind(nic) == primary)
    ]
    ports = [nic for nic in members if _carries(nic)]
    lacking, missing = _missing(machine, members, paths)
    return Fabric(
        ports=tuple(ports if named else ports[: len(machine.gpus)]),
        silent=tuple(nic for nic in members if not _carries(nic)),
        left_out=tuple(nic for nic in machine.nics if nic not in members),
        placed=bool(named),
        lacking=lacking,
        missing=missing,
    )


def _named(machine: Machine, candidates: Sequence[Nic], paths: _Paths) -> set[tuple[str, int]]:
    """Keys of the ports that GPUs name."""
    nearest = [{_key(nic) for nic in _nearest(gpu, candidates, paths)} for gpu in machine.gpus]
    switched = {_key(nic) for nic in candidates if _near_gpus(machine, nic, paths)}
    return {key for keys in nearest for key in keys & switched or keys}


def _missing(
    machine: Machine, members: Sequence[Nic], paths: _Paths
) -> tuple[tuple[int, ...], int]:
    """GPUs that lack ports below their switches, at most a quarter of all, and how many ports."""
    own = {gpu.index: 0.0 for gpu in machine.gpus}
    for nic in members:
        near = _near_gpus(machine, nic, paths)
        for gpu in near:
            own[gpu.index] += 1 / len(near)
    usual = max(own.values(), default=0.0)
    lacking = tuple(index for index, ports in own.items() if ports < usual)
    if not lacking or 4 * len(lacking) > len(own) or len({*own.values()}) > 2:
        return (), 0
    return lacking, round(sum(usual - own[index] for index in lacking))


def rails_of(machine: Machine) -> tuple[Rail, ...]:
    """The ports of the compute fabric that are up, and the GPUs that each serves."""
    fabric, paths = fabric_of(machine), _paths(machine)
    served = _served(machine, fabric, paths)
    return tuple(
        Rail(
            nic=nic.name,
            port=nic.port,
            link_layer=nic.link_layer,
            gpus=tuple(gpu.index for gpu in gpus),
            path=_farthest(nic, gpus, paths),
            bandwidth_bytes_per_second=_port_bytes_per_second(nic, fabric.ports),
            expected_bytes_per_second=_expected_bytes_per_second(nic, fabric.ports),
        )
        for nic, gpus in zip(fabric.ports, served, strict=True)
    )


def _port_bytes_per_second(nic: Nic, ports: Sequence[Nic]) -> float:
    """Rate of a port that is up, or its share of its PCIe link where that is slower."""
    healthy = _healthy_bytes_per_second(nic, ports)
    degraded = nic_link_bytes_per_second(nic)
    return healthy if degraded is None else min(healthy, degraded / _on_card(nic, ports))


def _healthy_bytes_per_second(nic: Nic, ports: Sequence[Nic]) -> float:
    """Rate of a port; of a card with several ports no more than its share of the PCIe link that
    the card can have."""
    rate = nic.rate_bytes_per_second or 0.0
    link = pcie_bytes_per_second(nic.pcie_max_generation, nic.pcie_max_width)
    together = _on_card(nic, ports)
    return rate if link is None or together == 1 else min(rate, link / together)


def _on_card(nic: Nic, ports: Sequence[Nic]) -> int:
    """Ports that share the card, and so its PCIe link, with this one; functions of a shared adapter
    may have a link each, for all that is known."""
    if nic.bus_id is None or nic.virtual_function:
        return 1
    card = nic.bus_id[:-1]
    return sum(other.bus_id is not None and other.bus_id[:-1] == card for other in ports)


def _carries(nic: Nic) -> bool:
    return nic.state == "active" and bool(nic.rate_bytes_per_second)


def _expected_bytes_per_second(nic: Nic, ports: Sequence[Nic]) -> float:
    """The best rate among equals: what one of them has, all can have."""
    equals = [other for other in ports if _kind(other) == _kind(nic)]
    return max(_healthy_bytes_per_second(other, ports) for other in equals)


def _kind(nic: Nic) -> _Kind:
    """What equals have in common. Functions of a shared adapter may have any number."""
    function = None if nic.bus_id is None or nic.virtual_function else nic.bus_id[-1]
    chip = (nic.firmware or "").partition(".")[0]
    link = (nic.pcie_max_generation, nic.pcie_max_width)
    return (nic.link_layer, chip, link, function, nic.port, nic.virtual_function)


def _key(nic: Nic) -> tuple[str, int]:
    return (nic.name, nic.port)


def _paths(machine: Machine) -> _Paths:
    return {
        (gpu.index, *_key(nic)): path
        for gpu in machine.gpus
        for nic in machine.nics
        if gpu.bus_id is not None
        and nic.bus_id is not None
        and (path := path_in(machine, gpu.bus_id, nic.bus_id)) is not None
    }


def _primary_kind(machine: Machine, paths: _Paths) -> _Kind | None:
    """The kind that tells the fabric's link layer, or None without any port that is up."""
    near, rates = Counter[_Kind](), Counter[_Kind]()
    for nic in machine.nics:
        if nic.link_layer in ("infiniband", "ethernet", "efa"):
            near[_kind(nic)] += len(_near_gpus(machine, nic, paths))
            rates[_kind(nic)] += int(nic.rate_bytes_per_second or 0) if _carries(nic) else 0
    usable = [kind for kind, rate in rates.items() if rate]
    return max(usable, key=lambda kind: (near[kind], rates[kind], str(kind)), default=None)


def _near_gpus(machine: Machine, nic: Nic, paths: _Paths) -> list[Gpu]:
    """GPUs that share a PCIe switch with the port."""
    return [gpu for gpu in machine.gpus if paths.get((gpu.index, *_key(nic))) in _SWITCHED]


def _nearest(gpu: Gpu, nics: Sequence[Nic], paths: _Paths) -> list[Nic]:
    """Those of `nics` that are nearest to `gpu`; none where no way is known."""
    ranked = [
        (NEAREST_FIRST.index(path), nic)
        for nic in nics
        if (path := paths.get((gpu.index, *_key(nic)))) is not None
    ]
    least = min((rank for rank, _ in ranked), default=0)
    return [nic for rank, nic in ranked if rank == least]


def _served(machine: Machine, fabric: Fabric, paths: _Paths) -> list[list[Gpu]]:
    """GPUs that each port of the fabric serves."""
    if not fabric.placed:
        return [list(machine.gpus) for _ in fabric.ports]
    together: dict[tuple[int, ...], list[Gpu]] = {}
    for gpu in machine.gpus:
        nearest = _nearest(gpu, fabric.ports, paths)
        together.setdefault(tuple(fabric.ports.index(nic) for nic in nearest), []).append(gpu)
    served: list[list[Gpu]] = [[] for _ in fabric.ports]
    for ports, gpus in together.items():
        for gpu, port in _shared_out(gpus, ports):
            served[port].append(gpu)
    return [sorted(gpus, key=lambda gpu: gpu.index) for gpus in served]


def _shared_out(gpus: list[Gpu], ports: tuple[int, ...]) -> list[tuple[Gpu, int]]:
    """GPUs and ports at one distance: evenly where the numbers allow it, else all with all."""
    if ports and len(gpus) % len(ports) == 0:
        each = len(gpus) // len(ports)
        return [(gpu, ports[place // each]) for place, gpu in enumerate(gpus)]
    if ports and len(ports) % len(gpus) == 0:
        each = len(ports) // len(gpus)
        return [(gpus[place // each], port) for place, port in enumerate(ports)]
    return [(gpu, port) for gpu in gpus for port in ports]


def _farthest(nic: Nic, gpus: list[Gpu], paths: _Paths) -> PciPath | None:
    """The farthest way to one of `gpus`; None where one is unknown."""
    known = [path for gpu in gpus if (path := paths.get((gpu.index, *_key(nic)))) is not None]
    if not known or len(known) < len(gpus):
        return None
    return max(known, key=NEAREST_FIRST.index)
