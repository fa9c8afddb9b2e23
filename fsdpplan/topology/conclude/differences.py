"""Differences between hosts that should be equal, told against the majority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdpplan.spec.machine import Machine
from fsdpplan.spec.nodes import compress_host_list
from fsdpplan.spec.topology import Finding, Severity
from fsdpplan.topology.conclude.rails import fabric_of, rails_of
from fsdpplan.units import format_bit_bandwidth, format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aspect:
    """One thing in which hosts should be equal."""

    name: str
    value: Callable[[Machine], str | None]
    """What a host says of it, in words; None where it says nothing."""
    severity: Severity
    consequence: str
    remedy: str | None


def differences(machines: Sequence[Machine]) -> tuple[Finding, ...]:
    """Where hosts are not what most of them are, those with the same value together.

    A host that says nothing of an aspect is not compared in it. Without a majority, as between two
    hosts, the first is taken for what was meant.
    """
    found = [finding for aspect in _ASPECTS for finding in _differing(machines, aspect)]
    found += _slow_networks(machines)
    return tuple(found)


def _differing(machines: Sequence[Machine], aspect: _Aspect) -> list[Finding]:
    told = [
        (machine.host.name, value)
        for machine in machines
        if (value := aspect.value(machine)) is not None
    ]
    values = [value for _, value in told]
    usual = _majority(values)
    found: list[Finding] = []
    for value in dict.fromkeys(values):
        if value == usual:
            continue
        nodes = compress_host_list(name for name, each in told if each == value)
        found.append(
            Finding(
                kind="nodes_differ",
                severity=aspect.severity,
                host=nodes,
                where=aspect.name,
                text=f"{aspect.name}: {value} on {nodes}, {usual} on "
                f"{_others(values.count(usual or ''))}",
                consequence=aspect.consequence,
                remedy=aspect.remedy or f"leave it out: emit-launch --exclude {nodes}",
                slowdown=None,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    """Those of a host's compute fabric, as if all were healthy."""

    count: int
    gpus: int
    bytes_per_second: float
    """Of each."""

    @property
    def share(self) -> int:
        """Bytes a second that one GPU gets of them."""
        return round(self.count * self.bytes_per_second / self.gpus)

    @property
    def words(self) -> str:
        rate = format_bit_bandwidth(self.bytes_per_second)
        return f"{self.count} x {rate} for {self.gpus} GPUs"


def _slow_networks(machines: Sequence[Machine]) -> list[Finding]:
    """Hosts whose healthy ports give a GPU less than those of most hosts, or more."""
    ports = {machine.host.name: found for machine in machines if (found := _ports_of(machine))}
    if not ports:
        return []
    commonest = Counter(each.share for each in ports.values()).most_common(1)[0][0]
    usual = next(each for each in ports.values() if each.share == commonest)
    others = dict.fromkeys(each for each in ports.values() if each.share != usual.share)
    return [_other_ports(ports, each, usual) for each in others]


def _ports_of(machine: Machine) -> _Ports | None:
    rails, fabric = rails_of(machine), fabric_of(machine)
    if not rails or not machine.gpus:
        return None
    return _Ports(
        count=len(rails) + len(fabric.silent) + fabric.missing,
        gpus=len(machine.gpus),
        bytes_per_second=min(rail.expected_bytes_per_second for rail in rails),
    )


def _other_ports(ports: dict[str, _Ports], other: _Ports, usual: _Ports) -> Finding:
    nodes = compress_host_list(name for name, each in ports.items() if each == other)
    slower = other.share < usual.share
    equals = sum(each.share == usual.share for each in ports.values())
    return Finding(
        kind="nodes_differ",
        severity="degraded" if slower else "note",
        host=nodes,
        where="ports",
        text=f"ports: {other.words} on {nodes}, {usual.words} on {_others(equals)}",
        consequence="the slowest host sets the ring: all-gather over the network "
        f"{usual.share / other.share:.1f}x slower"
        if slower
        else "it waits for the others: what it has more is of no use to a job with them",
        remedy=f"leave it out: emit-launch --exclude {nodes}",
        slowdown=usual.share / other.share if slower else None,
    )


def _others(count: int) -> str:
    return "the other host" if count == 1 else f"{count} others"


def _majority(values: Sequence[str]) -> str | None:
    """The commonest value; of equally common ones the first."""
    return Counter(values).most_common(1)[0][0] if values else None


def _models(machine: Machine) -> str | None:
    models = {
        gpu.name if gpu.memory_bytes is None else f"{gpu.name} ({format_gib(gpu.memory_bytes)})"
        for gpu in machine.gpus
    }
    return ", ".join(sorted(models)) or None


def _gpudirect(machine: Machine) -> str | None:
    """The one way is as good as the other."""
    way = machine.host.gpudirect
    return way if way in (None, "none") else "works"


def _adapters(machine: Machine) -> str | None:
    return ", ".join(nic.name for nic in machine.nics) or None


_ASPECTS = (
    _Aspect(
        name="GPUs",
        value=lambda machine: str(len(machine.gpus)),
        severity="broken",
        consequence="every node of a job has the same number of processes: as many as the host "
        "with the fewest GPUs",
        remedy=None,
    ),
    _Aspect(
        name="GPU model",
        value=_models,
        severity="degraded",
        consequence="the slowest GPU sets every step, and the smallest memory what fits",
        remedy=None,
    ),
    _Aspect(
        name="adapters",
        value=_adapters,
        severity="note",
        consequence="one list of adapters for all (NCCL_IB_HCA) may not suit these hosts",
        remedy="nothing, where NCCL finds the adapters itself; else name them alike (udev rules)",
    ),
    _Aspect(
        name="GPUDirect",
        value=_gpudirect,
        severity="degraded",
        consequence="hosts without it copy every byte through host memory, and the others wait",
        remedy="load the same modules on all hosts (nvidia-peermem, or the open driver)",
    ),
    _Aspect(
        name="NCCL",
        value=lambda machine: machine.software.nccl,
        severity="broken",
        consequence="ranks with different versions of NCCL do not join, or hang",
        remedy="install the same environment on all hosts",
    ),
    _Aspect(
        name="torch",
        value=lambda machine: machine.software.torch,
        severity="broken",
        consequence="ranks run different programs: collectives may not match, and results differ",
        remedy="install the same environment on all hosts",
    ),
    _Aspect(
        name="driver",
        value=lambda machine: machine.software.driver,
        severity="note",
        consequence="speed and supported CUDA versions may differ",
        remedy="install the same driver on all hosts",
    ),
)
