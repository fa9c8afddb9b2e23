"""The level between nodes: ports of the compute fabric, of GPUDirect-TCPX, or plain Ethernet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdpplan.spec.machine import Interface, LinkLayer, Machine
from fsdpplan.spec.topology import FoundLevel, Island, LevelKind, Rail
from fsdpplan.topology.conclude.rails import fabric_of
from fsdpplan.topology.read.lanes import (
    gpu_link_bytes_per_second,
    healthy_gpu_link_bytes_per_second,
)

_LEVEL_KINDS: dict[LinkLayer | None, LevelKind] = {
    "infiniband": "infiniband",
    "ethernet": "roce",
    "efa": "efa",
}


def network_level(
    machine: Machine, islands: Sequence[Island], rails: Sequence[Rail]
) -> FoundLevel | None:
    """The network between nodes, as far as its rate is known."""
    if not machine.gpus:
        return None
    level = (
        _rdma_level(machine, rails) if rails else _tcpx_level(machine) or _ethernet_level(machine)
    )
    if level is None:
        return None
    return replace(level, ports=level.ports * _hosts_in_domain(machine, islands))


def across_bytes_per_second(
    machine: Machine, islands: Sequence[Island], network: FoundLevel
) -> float:
    """What one GPU gets out of the node when all send: all ports over all GPUs, and no more than
    its own PCIe link where that has lost lanes."""
    gpus = len(machine.gpus) * _hosts_in_domain(machine, islands)
    share = network.port_bandwidth_bytes_per_second * network.ports / gpus
    degraded = [
        now
        for gpu in machine.gpus
        if (now := gpu_link_bytes_per_second(gpu)) is not None
        and now < (healthy_gpu_link_bytes_per_second(gpu) or 0)
    ]
    return min([share, *degraded])


def tcpx_interfaces(machine: Machine) -> tuple[Interface, ...]:
    """Interfaces over which GPUDirect-TCPX sends: Google's virtual adapters beside the host's own.

    Source: Google's files for TCPX on a3-highgpu-8g (container-engine-accelerators,
    gpudirect-tcpx): eth1 to eth4 carry GPUs' traffic, eth0 control.
    """
    stack = any("tcpx" in path or "fastrak" in path for path in machine.software.net_plugins)
    google = machine.cloud is not None and machine.cloud.provider == "gcp"
    if not stack or not google or host_interface(machine) is None:
        return ()
    return tuple(
        interface
        for interface in machine.interfaces
        if interface.driver == "gve" and interface.up and not interface.default_route
    )


def host_interface(machine: Machine) -> Interface | None:
    """The interface that leads out of the host: the one with the default route."""
    return next((each for each in machine.interfaces if each.default_route and each.up), None)


def closed_to_adapters(machine: Machine) -> bool:
    """Adapters cannot read the memory of these GPUs, whatever is loaded: GeForce.

    Source: NVIDIA GPUDirect RDMA User Manual 1.8, system requirements: Tesla and Quadro.
    """
    return any("GeForce" in gpu.name for gpu in machine.gpus)


def _hosts_in_domain(machine: Machine, islands: Sequence[Island]) -> int:
    """Hosts that share one NVLink domain, as far as they were seen, each with as many GPUs."""
    domain = next((each.domain_gpus for each in islands if each.fabric is not None), None)
    return max(1, (domain or 0) // len(machine.gpus))


def _rdma_level(machine: Machine, rails: Sequence[Rail]) -> FoundLevel:
    """The rails. Every ring or tree uses all ports alike, so the slowest sets them all, and what a
    silent or missing port should carry is spread over the others."""
    fabric = fabric_of(machine)
    ports = len(rails) + len(fabric.silent) + fabric.missing
    slowest = min(rail.bandwidth_bytes_per_second for rail in rails)
    names = ", ".join(rail.nic for rail in rails[:8]) + (", ..." if len(rails) > 8 else "")
    return FoundLevel(
        kind=_LEVEL_KINDS[rails[0].link_layer],
        domain_gpus=None,
        ports=ports,
        port_bandwidth_bytes_per_second=slowest * len(rails) / ports,
        healthy_bandwidth_bytes_per_second=min(rail.expected_bytes_per_second for rail in rails),
        gpudirect=machine.host.gpudirect in ("peermem", "dmabuf")
        and not closed_to_adapters(machine),
        evidence=f"rates of the ports of {names}",
    )


def _tcpx_level(machine: Machine) -> FoundLevel | None:
    """GPUDirect-TCPX copies device memory over plain Ethernet adapters."""
    interfaces = tcpx_interfaces(machine)
    rates = [each.speed_bytes_per_second for each in interfaces]
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(rates):
        return None
    return FoundLevel(
        kind="tcpx",
        domain_gpus=None,
        ports=len(known),
        port_bandwidth_bytes_per_second=min(known),
        healthy_bandwidth_bytes_per_second=max(known),
        gpudirect=True,
        evidence=f"speeds of {', '.join(each.name for each in interfaces)}",
    )


def _ethernet_level(machine: Machine) -> FoundLevel | None:
    """Sockets over the interface that leads out of the host."""
    interface = host_interface(machine)
    if interface is None or interface.speed_bytes_per_second is None:
        return None
    return FoundLevel(
        kind="ethernet",
        domain_gpus=None,
        ports=1,
        port_bandwidth_bytes_per_second=interface.speed_bytes_per_second,
        healthy_bandwidth_bytes_per_second=interface.speed_bytes_per_second,
        gpudirect=False,
        evidence=f"speed of {interface.name}, which has the default route",
    )
