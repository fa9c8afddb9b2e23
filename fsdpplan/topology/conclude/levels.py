"""Levels: the links of a host and of its network, from the inside out.

A level is as fast as its slowest part, because collectives are rings whose every step waits for
the slowest link; without what is degraded it is as fast as its equals.

Islands: which GPUs of a host reach each other over NVLink.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdpplan.spec.machine import Gpu, GpuFabric, Machine, NvLink
from fsdpplan.spec.topology import FoundLevel, Island, IslandKind, Topology
from fsdpplan.topology.conclude.network_level import across_bytes_per_second, network_level
from fsdpplan.topology.conclude.rails import rails_of
from fsdpplan.topology.read.lanes import (
    gpu_link_bytes_per_second,
    healthy_gpu_link_bytes_per_second,
    socket_bytes_per_second,
)


def islands_of(machine: Machine, *, others: Sequence[Machine] = ()) -> tuple[Island, ...]:
    """Every GPU of `machine` in exactly one island, in the order of their first GPU.

    Direct links join their two ends; links to switches join all GPUs that have such links and are
    in the same domain. A GPU in MIG mode reads no other GPU (NVIDIA, P2P CUDA transfers: not for
    MIG-backed devices), and a link whose other end is unknown joins nothing.
    `others` are the other hosts that were read: a domain that spans hosts has at least their GPUs.
    """
    groups = _groups(machine.gpus)
    return tuple(_island(group, others) for group in groups)


def inner_links(gpu: Gpu, members: Iterable[Gpu]) -> tuple[NvLink, ...]:
    """Active links of `gpu` that lead to `members`, through a switch or directly."""
    addresses = {other.bus_id for other in members if other.bus_id != gpu.bus_id}
    return tuple(
        link
        for link in gpu.nvlinks
        if link.active
        and (link.remote == "switch" or (link.remote == "gpu" and link.remote_bus_id in addresses))
    )


def _groups(gpus: tuple[Gpu, ...]) -> list[list[Gpu]]:
    """Connected components."""
    waiting = list(gpus)
    groups: list[list[Gpu]] = []
    while waiting:
        group = [waiting.pop(0)]
        for member in group:  # grows while it is walked
            found = [other for other in waiting if _joined(member, other)]
            group += found
            waiting = [other for other in waiting if other not in found]
        groups.append(sorted(group, key=lambda gpu: gpu.index))
    return groups


def _joined(one: Gpu, other: Gpu) -> bool:
    if one.mig_enabled or other.mig_enabled:
        return False
    if _on_switch(one) and _on_switch(other) and one.fabric == other.fabric:
        return True
    return _direct(one, other) and _direct(other, one)


def _on_switch(gpu: Gpu) -> bool:
    return any(link.active and link.remote == "switch" for link in gpu.nvlinks)


def _direct(one: Gpu, other: Gpu) -> bool:
    return other.bus_id is not None and any(
        link.active and link.remote == "gpu" and link.remote_bus_id == other.bus_id
        for link in one.nvlinks
    )


def _island(group: list[Gpu], others: Sequence[Machine]) -> Island:
    first = group[0]
    spans_hosts = first.fabric is not None and _on_switch(first) and not first.mig_enabled
    alone = len(group) == 1 and not spans_hosts
    kind: IslandKind = "alone"
    if not alone:
        kind = "nvswitch" if _on_switch(first) else "nvlink"
    return Island(
        gpus=tuple(gpu.index for gpu in group),
        kind=kind,
        bandwidth_bytes_per_second=None if alone else _bandwidth_bytes_per_second(group),
        domain_gpus=_domain_gpus(first.fabric, others, own=len(group))
        if spans_hosts
        else len(group),
        fabric=f"{first.fabric.cluster_uuid}/{first.fabric.clique}"
        if spans_hosts and first.fabric is not None
        else None,
    )


def _bandwidth_bytes_per_second(group: list[Gpu]) -> float | None:
    """What the GPU with the least has into the island: the slowest sets the ring."""
    sums: list[float] = []
    for gpu in group:
        rates = [link.bandwidth_bytes_per_second for link in inner_links(gpu, group)]
        if not rates or any(rate is None for rate in rates):
            return None
        sums.append(sum(rate for rate in rates if rate is not None))
    return min(sums)


def _domain_gpus(fabric: GpuFabric | None, others: Sequence[Machine], *, own: int) -> int | None:
    """GPUs seen in a domain that spans hosts; one host cannot tell how many there are."""
    if not others:
        return None
    return own + sum(gpu.fabric == fabric for machine in others for gpu in machine.gpus)


def topology_of(machine: Machine, *, others: Sequence[Machine] = ()) -> Topology:
    """Islands, rails and levels of `machine`; `others` are the other hosts that were read."""
    islands, rails = islands_of(machine, others=others), rails_of(machine)
    inside = _inside_levels(machine, islands)
    network = network_level(machine, islands, rails)
    complete = len(machine.gpus) < 2 or (
        bool(inside) and (inside[-1].domain_gpus or 0) >= len(machine.gpus)
    )
    return Topology(
        islands=islands,
        rails=rails,
        levels=(*inside, *(() if network is None else (network,))),
        inside_bytes_per_second=(
            min((level.port_bandwidth_bytes_per_second for level in inside), default=None)
            if complete
            else None
        ),
        across_bytes_per_second=(
            None if network is None else across_bytes_per_second(machine, islands, network)
        ),
    )


def _inside_levels(machine: Machine, islands: Sequence[Island]) -> list[FoundLevel]:
    """Levels within the host, as far as their bandwidth is known: NVLink, PCIe, sockets."""
    gpus = machine.gpus
    levels: list[FoundLevel] = []
    joined = min((len(island.gpus) for island in islands), default=0)
    spans_hosts = any(island.fabric is not None for island in islands)
    if joined > 1 or spans_hosts:
        nvlink = _nvlink_level(machine, islands)
        if nvlink is None:
            return levels
        levels.append(nvlink)
    if joined == len(gpus) or spans_hosts or len(gpus) < 2:
        return levels
    pcie = _pcie_level(machine, below=max(joined, 1))
    if pcie is None:
        return levels
    levels += [pcie] if (pcie.domain_gpus or 0) > joined else []
    socket = _socket_level(machine, pcie)
    return levels if socket is None else [*levels, socket]


def _nvlink_level(machine: Machine, islands: Sequence[Island]) -> FoundLevel | None:
    """The islands, all links of a GPU taken as one port; as large as the smallest of them."""
    rates = [island.bandwidth_bytes_per_second for island in islands]
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(rates):
        return None
    domains = [island.domain_gpus or len(island.gpus) for island in islands]
    healthy = max(_most_links_bytes_per_second(machine, island) for island in islands)
    kind = "NVSwitch" if islands[0].kind == "nvswitch" else "direct links"
    spans = any(island.fabric is not None for island in islands)
    counted = " that spans hosts, of which these GPUs were seen" if spans else ""
    return FoundLevel(
        kind="nvlink",
        domain_gpus=min(domains),
        ports=1,
        port_bandwidth_bytes_per_second=min(known),
        healthy_bandwidth_bytes_per_second=max(healthy, min(known)),
        gpudirect=True,
        evidence=f"NVLinks of each GPU by the driver ({kind}), a domain{counted}",
    )


def _most_links_bytes_per_second(machine: Machine, island: Island) -> float:
    """What a GPU of the island has with all its links up: the best among equals, or as many links
    as it shows at the rate of those that are up."""
    members = [gpu for gpu in machine.gpus if gpu.index in island.gpus]
    best = 0.0
    for gpu in members:
        inner = inner_links(gpu, members)
        rates = [link.bandwidth_bytes_per_second or 0.0 for link in inner]
        down = 0 if island.kind != "nvswitch" else sum(not link.active for link in gpu.nvlinks)
        best = max(best, sum(rates) + down * max(rates, default=0.0))
    return best


def _pcie_level(machine: Machine, *, below: int) -> FoundLevel | None:
    """GPUs of one socket over PCIe, each by its own link; None where a link is unknown."""
    now = _least(gpu_link_bytes_per_second(gpu) for gpu in machine.gpus)
    healthy = _least(healthy_gpu_link_bytes_per_second(gpu) for gpu in machine.gpus)
    sizes = _socket_sizes(machine)
    if now is None or healthy is None or sizes is None:
        return None
    return FoundLevel(
        kind="pcie",
        domain_gpus=min(sizes),
        ports=below,
        port_bandwidth_bytes_per_second=now,
        healthy_bandwidth_bytes_per_second=healthy,
        gpudirect=_reads_peers(machine),
        evidence="PCIe generation and lanes of each GPU by the driver; GPUs of one NUMA node",
    )


def _least(rates: Iterable[float | None]) -> float | None:
    """The least, or None where one is unknown."""
    found = list(rates)
    known = [rate for rate in found if rate is not None]
    return min(known) if known and len(known) == len(found) else None


def _socket_sizes(machine: Machine) -> list[int] | None:
    """GPUs at each NUMA node; None where that is unknown."""
    nodes = [gpu.numa_node for gpu in machine.gpus]
    known = [node for node in nodes if node is not None]
    if len(known) == len(nodes):
        return [known.count(node) for node in sorted(set(known))]
    return [len(nodes)] if 1 in (machine.host.numa_nodes, machine.host.sockets) else None


def _socket_level(machine: Machine, pcie: FoundLevel) -> FoundLevel | None:
    """All GPUs over the link between sockets; None with one socket or an unknown CPU."""
    rate = socket_bytes_per_second(machine.host.cpu)
    sizes = _socket_sizes(machine) or []
    if len(sizes) < 2 or rate is None:
        return None
    return FoundLevel(
        kind="socket",
        domain_gpus=len(machine.gpus),
        ports=1,
        port_bandwidth_bytes_per_second=min(rate, pcie.port_bandwidth_bytes_per_second),
        healthy_bandwidth_bytes_per_second=min(rate, pcie.healthy_bandwidth_bytes_per_second),
        gpudirect=_reads_peers(machine),
        evidence=f"the link between sockets of {machine.host.cpu}, as NCCL takes it",
    )


def _reads_peers(machine: Machine) -> bool:
    """Every two GPUs may read each other's memory."""
    return bool(machine.pairs) and all(pair.p2p == "ok" for pair in machine.pairs)
