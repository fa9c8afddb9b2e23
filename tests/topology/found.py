"""Recorded machines as values, and changed copies of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from fsdpplan.spec.machine import Gpu, Interface, Machine, Nic
from fsdpplan.spec.topology import Finding, Topology
from fsdpplan.topology.conclude.findings import findings_of
from fsdpplan.topology.conclude.levels import topology_of
from fsdpplan.topology.conclude.machine import machine_of
from tests.topology.recorded import recorded


@cache
def machine(name: str) -> Machine:
    return machine_of(recorded(name))


def topology(name: str) -> Topology:
    return topology_of(machine(name))


def findings(of: Machine) -> tuple[Finding, ...]:
    return findings_of(of, topology_of(of))


def only(of: Machine) -> Finding:
    """The one finding there is."""
    (finding,) = findings(of)
    return finding


def with_gpus(of: Machine, *indices: int, **changes: Any) -> Machine:
    """The same machine, with these fields of some GPUs (all, if none is named) changed."""

    def changed(gpu: Gpu) -> Gpu:
        return replace(gpu, **changes) if not indices or gpu.index in indices else gpu

    return replace(of, gpus=tuple(changed(gpu) for gpu in of.gpus))


def without_gpus(of: Machine, *indices: int) -> Machine:
    """The same machine as its driver shows it when some GPUs have gone: the others move up."""
    left = [gpu for gpu in of.gpus if gpu.index not in indices]
    new = {gpu.index: place for place, gpu in enumerate(left)}
    return replace(
        of,
        gpus=tuple(replace(gpu, index=new[gpu.index]) for gpu in left),
        pairs=tuple(
            replace(pair, first=new[pair.first], second=new[pair.second])
            for pair in of.pairs
            if pair.first in new and pair.second in new
        ),
    )


def with_nics(of: Machine, *names: str, **changes: Any) -> Machine:
    def changed(nic: Nic) -> Nic:
        return replace(nic, **changes) if not names or nic.name in names else nic

    return replace(of, nics=tuple(changed(nic) for nic in of.nics))


def with_interfaces(of: Machine, *names: str, **changes: Any) -> Machine:
    def changed(interface: Interface) -> Interface:
        return replace(interface, **changes) if interface.name in names else interface

    return replace(of, interfaces=tuple(changed(each) for each in of.interfaces))


def with_host(of: Machine, **changes: Any) -> Machine:
    return replace(of, host=replace(of.host, **changes))


def links_down(gpu: Gpu, *, down: int) -> Gpu:
    """The GPU with its first links down."""
    return replace(
        gpu,
        nvlinks=tuple(
            replace(link, active=False, bandwidth_bytes_per_second=None)
            if link.link < down
            else link
            for link in gpu.nvlinks
        ),
    )
