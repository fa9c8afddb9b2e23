"""What a plan counts on between nodes: adapters that move data without sockets."""

from __future__ import annotations

from fsdpplan.spec.cluster import Level
from fsdpplan.spec.plan import Plan

RDMA = frozenset(
    {"infiniband", "roce", "efa", "fastrak", "tcpxo", "gib", "rdma", "omni-path", "slingshot"}
)
"""Names of levels and transports whose adapters move data without sockets."""
NOT_ADAPTERS = frozenset({"nvlink", "tcpx", "ethernet"})
"""Levels between nodes that are no RDMA adapters, whatever they can do: NVLink of NVL72, and
sockets, with GPUDirect-TCPX or without."""


def levels_between(plan: Plan) -> list[Level]:
    """Levels of the network between nodes, NVLink apart."""
    cluster = plan.cluster
    beyond = [level for level in cluster.levels if cluster.joins_nodes(level)]
    return [level for level in beyond if level.name != "nvlink"]


def has_sockets_only(plan: Plan) -> bool:
    """Whether the network that was looked at has nothing but sockets."""
    network = plan.cluster.network
    return network is not None and network.transport in ("ethernet", "tcpx")


def adapter_words(plan: Plan) -> str | None:
    """That there are RDMA adapters, as far as the plan knows; None where it knows of none."""
    network = plan.cluster.network
    if has_sockets_only(plan):
        return None
    if network is not None:
        count = f"{len(network.hcas)} " if network.hcas else ""
        return f"each node has {count}{network.transport} adapters"
    for level in levels_between(plan):
        if level.name in RDMA or (level.gpudirect and level.name not in NOT_ADAPTERS):
            ports = f"{level.ports} {level.name} port{'s' if level.ports > 1 else ''}"
            return f"the plan counts on {ports} a node"
    return None
