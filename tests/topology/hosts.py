"""Equal hosts of an allocation, some of them changed, and what a survey of them says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpplan.spec.machine import GpuFabric, Machine
from fsdpplan.topology.survey import Survey, survey_of
from tests.topology.found import links_down, machine, with_gpus, with_host, with_nics

PORT_BYTES_PER_SECOND = 50e9
"""One of the eight compute ports of a DGX H100."""


def host(number: int, of: str = "dgx-h100") -> Machine:
    """`n01`, `n02`, ...: the recorded machine under another name."""
    return with_host(machine(of), name=f"n{number:02}")


def hosts(count: int, of: str = "dgx-h100") -> list[Machine]:
    return [host(number, of) for number in range(1, count + 1)]


def slow_port(of: Machine, *names: str, rate: float = PORT_BYTES_PER_SECOND / 4) -> Machine:
    """The host with these ports at a lower rate; all of them, if none is named."""
    return with_nics(of, *names, rate_bytes_per_second=rate)


def weak_links(of: Machine, *, down: int) -> Machine:
    """The host whose first GPU has NVLinks down."""
    first, *others = of.gpus
    return replace(of, gpus=(links_down(first, down=down), *others))


def in_domain(of: Machine, cluster_uuid: str, **changes: Any) -> Machine:
    """A tray that has joined another NVLink domain."""
    return with_gpus(of, fabric=GpuFabric(cluster_uuid=cluster_uuid, clique=1), **changes)


def surveyed(*machines: Machine) -> Survey:
    return survey_of(machines)
