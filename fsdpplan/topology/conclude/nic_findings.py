"""What is wrong with the ports of the compute fabric and with their way to the GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fsdpplan.spec.machine import Machine, Nic
from fsdpplan.spec.topology import Finding, Rail, Topology
from fsdpplan.topology.conclude.rails import Fabric, fabric_of
from fsdpplan.topology.read.lanes import nic_link_bytes_per_second
from fsdpplan.units import format_bandwidth, format_bit_bandwidth

_WHY_SILENT: Mapping[str | None, str] = {
    "down": "is down",
    "init": "has a link, but no subnet manager has brought it up (INIT)",
    "armed": "has a link, but no subnet manager has brought it up (ARMED)",
}


def nic_findings(machine: Machine, topology: Topology) -> list[Finding]:
    """Ports that are slow or down, and memory that they cannot read; nothing without GPUs."""
    if not machine.gpus:
        return []
    fabric = fabric_of(machine)
    slow = [
        finding
        for rail, nic in zip(topology.rails, fabric.ports, strict=True)
        for finding in (_slow_rate(machine, topology, rail, nic), _slow_pcie(machine, rail, nic))
        if finding is not None
    ]
    down = [nic for nic in fabric.silent if nic.state in _WHY_SILENT]
    if not fabric.ports:
        return _none_up(machine, down)
    silent = [_silent(machine, nic, active=len(fabric.ports), down=len(down)) for nic in down]
    return [
        *slow,
        *silent,
        *_missing(machine, fabric),
        *_no_gpudirect(machine, topology),
    ]


def _slow_rate(machine: Machine, topology: Topology, rail: Rail, nic: Nic) -> Finding | None:
    """The port negotiated less than its equals."""
    rate, expected = nic.rate_bytes_per_second or 0.0, rail.expected_bytes_per_second
    if not 0 < rate < expected:
        return None
    rates = Counter(
        other.bandwidth_bytes_per_second for other in topology.rails if other is not rail
    )
    others = ", ".join(
        f"{count} at {format_bit_bandwidth(each)}" for each, count in sorted(rates.items())
    )
    others = f"the other {others}" if len(rates) == 1 else f"of the others {others}"
    slowdown = expected / rate
    return Finding(
        kind="nic_slow",
        severity="degraded",
        host=machine.host.name,
        where=rail.nic,
        text=f"{rail.nic} runs at {format_bit_bandwidth(rate)}, {others}",
        consequence="the slowest link sets the ring: all-gather over the network "
        f"{slowdown:.1f}x slower",
        remedy=f"check its cable and switch port (ibstat {rail.nic}), or leave the node out: "
        f"emit-launch --exclude {machine.host.name}",
        slowdown=slowdown,
    )


def _slow_pcie(machine: Machine, rail: Rail, nic: Nic) -> Finding | None:
    """The adapter's PCIe link is degraded and carries less than the port."""
    link, rate = nic_link_bytes_per_second(nic), nic.rate_bytes_per_second or 0.0
    carried, expected = rail.bandwidth_bytes_per_second, rail.expected_bytes_per_second
    if link is None or not carried < min(rate, expected):
        return None
    slowdown = expected / carried
    return Finding(
        kind="pcie_slow",
        severity="degraded",
        host=machine.host.name,
        where=rail.nic,
        text=f"{rail.nic} hangs on PCIe {nic.pcie_generation}.0 x{nic.pcie_width} "
        f"({format_bandwidth(link)}) of {nic.pcie_max_generation}.0 x{nic.pcie_max_width}, "
        f"its port runs at {format_bandwidth(rate)}",
        consequence="the slowest link sets the ring: all-gather over the network "
        f"{slowdown:.1f}x slower",
        remedy="reseat the adapter or its riser, and check the slot's setting in the BIOS",
        slowdown=slowdown,
    )


def _silent(machine: Machine, nic: Nic, *, active: int, down: int) -> Finding:
    """One of the ports of the fabric that are down."""
    ports = active + down
    why = _WHY_SILENT[nic.state or "down"]
    slowdown = ports / active
    return Finding(
        kind="nic_down",
        severity="degraded",
        host=machine.host.name,
        where=nic.name,
        text=f"{nic.name} {why}; {active} of {ports} ports of the fabric carry data",
        consequence=f"{active} ports carry what {ports} should: all-gather over the network "
        f"{slowdown:.2f}x slower, and GPUs beside {nic.name} go through farther adapters",
        remedy=f"check its cable and switch port (ibstat {nic.name}), or leave the node out: "
        f"emit-launch --exclude {machine.host.name}",
        slowdown=slowdown,
    )


def _missing(machine: Machine, fabric: Fabric) -> list[Finding]:
    """Ports that other GPUs have have gone from the bus beside some."""
    if not fabric.missing:
        return []
    there = len(fabric.ports) + len(fabric.silent)
    ports = there + fabric.missing
    gpus = ", ".join(map(str, fabric.lacking))
    them = f"GPU {gpus}" if len(fabric.lacking) == 1 else f"GPUs {gpus}"
    slowdown = ports / there
    return [
        Finding(
            kind="nic_down",
            severity="degraded",
            host=machine.host.name,
            where=them,
            text=f"{there} of {ports} ports of the fabric are there: {them} "
            f"{'lacks' if len(fabric.lacking) == 1 else 'lack'} what every other GPU has beside it",
            consequence=f"{there} ports carry what {ports} should: all-gather over the network "
            f"{slowdown:.2f}x slower, and {them} through farther adapters",
            remedy="look for the adapter in lspci and dmesg, and reseat or replace it, or leave "
            f"the node out: emit-launch --exclude {machine.host.name}",
            slowdown=slowdown,
        )
    ]


def _none_up(machine: Machine, down: list[Nic]) -> list[Finding]:
    """No port of the fabric is up: either `down` are all of it, or all adapters are down."""
    if not down and all(nic.state in _WHY_SILENT for nic in machine.nics):
        down = list(machine.nics)
    if not down:
        return []
    return [
        Finding(
            kind="nic_down",
            severity="broken",
            host=machine.host.name,
            where=", ".join(nic.name for nic in down),
            text=f"none of {len(down)} RDMA ports is up",
            consequence="between nodes NCCL falls back to sockets, or stops",
            remedy="ask who runs the fabric; ibstat shows the ports' state",
            slowdown=None,
        )
    ]


def _no_gpudirect(machine: Machine, topology: Topology) -> list[Finding]:
    """Adapters cannot read device memory."""
    if not topology.rails or machine.host.gpudirect != "none":
        return []
    return [
        Finding(
            kind="no_gpudirect",
            severity="degraded",
            host=machine.host.name,
            where="nvidia-peermem",
            text=f"{len(topology.rails)} RDMA ports, but neither nvidia-peermem is loaded nor can "
            "driver and kernel share device memory (DMA-BUF)",
            consequence="every byte between nodes is copied through host memory on both ends: two "
            "more copies, on the links that the GPUs share with it",
            remedy="modprobe nvidia-peermem, or the open kernel driver on Linux 5.12 or later",
            slowdown=None,
        )
    ]
