"""Topology: what is concluded from a machine. Islands, rails, levels of links, and what is wrong.

Bandwidths are one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.spec.machine import LinkLayer
from fsdpplan.spec.nodes import PciPath

IslandKind = Literal["nvswitch", "nvlink", "alone"]
"""All GPUs over switches, some by direct links, or one GPU without any."""
LevelKind = Literal[
    "nvlink", "pcie", "socket", "infiniband", "roce", "efa", "tcpx", "ethernet", "none"
]
FindingKind = Literal[
    "nic_slow",
    "nic_down",
    "pcie_slow",
    "nvlink_down",
    "gpu_missing",
    "power_capped",
    "no_p2p",
    "no_gpudirect",
    "acs",
    "locked_memory",
    "shared_memory",
    "mig",
    "ecc",
    "nodes_differ",
    "node_unread",
    "other_accelerator",
    "unread",
]
Severity = Literal["broken", "degraded", "note"]
"""`broken`: a job would fail or crawl; `degraded`: slower than the hardware; `note`: to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """GPUs that reach each other over NVLink."""

    gpus: tuple[int, ...]
    """Their indices on this host."""
    kind: IslandKind
    bandwidth_bytes_per_second: float | None
    """What one GPU has into the island, over all its links."""
    domain_gpus: int | None
    """GPUs in the whole domain where it spans hosts (NVL72); None where that is unknown, the count
    of `gpus` where it does not."""
    fabric: str | None
    """`cluster uuid/clique` of a domain that spans hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """One port of the compute fabric and the GPUs that it serves."""

    nic: str
    port: int
    link_layer: LinkLayer | None
    gpus: tuple[int, ...]
    """GPUs for which no other port is nearer."""
    path: PciPath | None
    """Farthest way from one of them to the port."""
    bandwidth_bytes_per_second: float
    """Rate of the port now."""
    expected_bytes_per_second: float
    """Rate that its equals on this host have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLevel:
    """One level of links, ready to become a `Level` of a cluster."""

    kind: LevelKind
    domain_gpus: int | None
    """GPUs that one domain joins; None: as many as there are (the network)."""
    ports: int
    """Ports by which one domain of the level below reaches this one."""
    port_bandwidth_bytes_per_second: float
    """One port, one direction, as it runs now."""
    healthy_bandwidth_bytes_per_second: float
    """The same without what is degraded."""
    gpudirect: bool
    evidence: str
    """Where the numbers are from, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Islands and rails of one host, and the levels that follow."""

    islands: tuple[Island, ...]
    rails: tuple[Rail, ...]
    levels: tuple[FoundLevel, ...]
    """Innermost first; empty without GPUs."""
    inside_bytes_per_second: float | None
    """What one GPU gets into its node's other GPUs (the slowest pair)."""
    across_bytes_per_second: float | None
    """What one GPU gets out of the node when all send: all ports over all GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the user should know, with what follows from it."""

    kind: FindingKind
    severity: Severity
    host: str
    where: str
    """Device, link or node, such as `mlx5_3` or `GPU 5`."""
    text: str
    """What is so, with the numbers: `mlx5_3 runs at 100 Gb/s, the other 7 at 400 Gb/s`."""
    consequence: str
    """What it does to a job: `the slowest link sets the ring: all-gather 4.0x slower`."""
    remedy: str | None
    """What to do about it."""
    slowdown: float | None
    """Factor on the level that it touches; None where it has none."""
