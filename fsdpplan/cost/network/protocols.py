"""Protocols: how NCCL's three ways to move a chunk trade bandwidth for latency.

LL sends a flag beside every 4 bytes, LL128 one beside every 120, Simple synchronises by chunk. The
numbers are those of NCCL's own tuning model (src/graph/tuning.cc: baseLatencies, hwLatencies,
llMaxBws, and the refinements in ncclTopoTuneModel); nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.spec.cluster import LowLatency


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What one protocol costs and carries."""

    name: LowLatency
    """The least that links must be capable of; `none` for Simple."""
    base_seconds: float | None
    """Start of a call; None: the level's own, which is fitted."""
    inner_hop_seconds: float
    """Hop inside a node beyond that of LL."""
    outer_hop_seconds: float
    """Hop between nodes beyond that of LL."""
    share: float
    """Share of the bandwidth that a ring gets."""
    tree_share: float
    """Share of the bandwidth that a tree gets."""
    inner_port_share: float = 1.0
    """Most of the links' datasheet bandwidth inside a node."""
    outer_cap_bytes_per_second: float = float("inf")
    """Most that one group gets between nodes, whatever its ports."""


SIMPLE = Protocol(
    name="none",
    base_seconds=None,
    inner_hop_seconds=2.8e-6,
    outer_hop_seconds=11.3e-6,
    share=1.0,
    tree_share=0.92,
)
LL128 = Protocol(
    name="ll128",
    base_seconds=14e-6,
    inner_hop_seconds=1.3e-6,
    outer_hop_seconds=1.3e-6,
    share=0.92,
    tree_share=0.92 * 120 / 128,
)
LL = Protocol(
    name="ll",
    base_seconds=6.6e-6,
    inner_hop_seconds=0.0,
    outer_hop_seconds=0.0,
    share=0.5,
    tree_share=0.92 / 3.8,
    # llMaxBws: 87.7 of 300 GB/s on A100, 141 of 450 on H100, 282 of 900 on B200
    inner_port_share=0.31,
    # llMaxBws over three nodes and more with Intel hosts; AMD hosts 19 to 35 GB/s
    outer_cap_bytes_per_second=20.4e9,
)

_CAPABLE: dict[LowLatency, tuple[Protocol, ...]] = {
    "none": (SIMPLE,),
    "ll": (SIMPLE, LL),
    "ll128": (SIMPLE, LL, LL128),
}


def protocols(links: tuple[LowLatency, ...]) -> tuple[Protocol, ...]:
    """The protocols that run over all of `links`: the least capable decides."""
    return min((_CAPABLE[link] for link in links), key=len)
