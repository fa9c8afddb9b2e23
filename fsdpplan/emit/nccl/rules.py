"""A rule: one variable of the environment, the evidence that sets it, and why it stays unset.

Each rule looks at a plan and gives a value with its reason, or says in words why there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fsdpplan.emit.job import Job
from fsdpplan.spec.cluster import Cluster, Device, Level, Vendor
from fsdpplan.spec.nodes import VERBS, Network, Transport
from fsdpplan.spec.plan import Plan

Kind = Literal["allocator", "threads", "order", "sockets", "fabric", "debugging"]

NCCL_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenValue:
    """A value that a rule chose for a plan."""

    value: str
    reason: str
    """Why this plan needs it, with the numbers of its topology."""
    expands: bool = False
    """The value is bash of ours, to stand in double quotes; otherwise it is literal."""
    on_node: bool = False
    """Each node sets it for itself, when it starts its ranks."""


Decide = Callable[[Plan, Job], ChosenValue | str]
"""The value for a plan, or why it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When one variable is set."""

    name: str
    kind: Kind
    when: str
    """The evidence that sets it, for the reference page."""
    versions: str
    """Which versions of what it holds for."""
    source: str
    """Where that was read."""
    decide: Decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable that a plan's job gets, unless the user has exported a value."""

    name: str
    value: str
    reason: str
    versions: str
    source: str
    kind: Kind
    expands: bool = False
    """The value is bash of ours, to stand in double quotes; otherwise it is literal."""
    on_node: bool = False
    """Each node sets it for itself, when it starts its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unset:
    """Variables that are left alone on purpose."""

    names: tuple[str, ...]
    why: str
    source: str
    transports: tuple[Transport, ...] = ()
    """Networks that it is about; empty: any."""
    vendors: tuple[Vendor, ...] = ()
    """Whose GPUs it is about; empty: any."""

    def is_about(self, cluster: Cluster) -> bool:
        """Whether it concerns the GPUs and the network of a cluster."""
        transport = None if cluster.network is None else cluster.network.transport
        return (not self.transports or transport in self.transports) and (
            not self.vendors or cluster.device.vendor in self.vendors
        )


def is_nvidia(device: Device) -> bool:
    """Whether NVIDIA's variables mean anything to it."""
    return device.kind == "cuda" and device.vendor == "nvidia"


def library_of(device: Device) -> str:
    """What torch's backend `nccl` is on such GPUs."""
    return "RCCL" if device.vendor == "amd" else "NCCL"


def network_between(plan: Plan, *, rccl: bool = False) -> Network | str:
    """The network between the plan's nodes, or why a variable of NCCL's cannot follow from it.

    `rccl`: RCCL reads the same variable with the same meaning.
    """
    cluster = plan.cluster
    if cluster.device.kind == "cpu":
        return "CPU processes talk by gloo, not NCCL"
    if not is_nvidia(cluster.device) and not rccl:
        return f"the rule is for NVIDIA's NCCL, and {cluster.device.name} is driven by RCCL"
    if cluster.nodes == 1:
        return "on one node nothing crosses the network"
    if cluster.network is None:
        return (
            "nothing is known of the network between the nodes: plan again with what "
            "`fsdpplan detect --nodes` finds"
        )
    return cluster.network


def verbs_between(plan: Plan, *, rccl: bool = False) -> Network | str:
    """Like `network_between`, of networks that NCCL's own verbs transport drives."""
    network = network_between(plan, rccl=rccl)
    if isinstance(network, Network) and network.transport not in VERBS:
        library = library_of(plan.cluster.device)
        return f"{library}'s own verbs transport does not carry {network.transport}"
    return network


def levels_between_nodes(cluster: Cluster) -> tuple[tuple[Level, float], ...]:
    """Levels that nodes are joined by, innermost first, each with what one GPU gets of it, in
    bytes per second, when all send."""
    below = (1, *(level.domain_gpus for level in cluster.levels))
    return tuple(
        (level, level.ports * level.port_bandwidth_bytes_per_second / gpus)
        for level, gpus in zip(cluster.levels, below, strict=False)
        if cluster.joins_nodes(level)
    )


def nccl_release(version: str | None) -> tuple[int, int] | None:
    """(2, 27) of `2.27.3`; None where it is unknown."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return None if match is None else (int(match[1]), int(match[2]))
