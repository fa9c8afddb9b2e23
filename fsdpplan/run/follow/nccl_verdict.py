"""Whether what NCCL did is what the plan counts on, and what to do where it is not."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.emit.nccl.adapters import (
    adapter_words,
    has_sockets_only,
    levels_between,
)
from fsdpplan.spec.cluster import Vendor
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.read.nccl_report import Connection, NcclReport

PEER_MEMORY: dict[Vendor, str] = {
    "nvidia": "look for nvidia_peermem in lsmod, or for DMA-BUF (open kernel driver, Linux >= "
    "5.12)",
    "amd": "look for amdkfd under /sys/kernel/mm/memory_peers, or for a kernel with DMA-BUF",
}
"""Where to look for what lets adapters read device memory. Source: RCCL and NCCL, net_ib.cc."""
PLUGINS = {
    "efa": "aws-ofi-nccl",
    "fastrak": "Google's GPUDirect-TCPXO",
    "tcpxo": "Google's GPUDirect-TCPXO",
    "gib": "Google's gIB",
}
"""Networks that NCCL reaches by a plugin only."""


def socket_sentence(report: NcclReport, *, plan: Plan, folder: Path) -> str | None:
    """What is wrong where sockets carry traffic between nodes that have RDMA adapters.

    None where they do not, and where the nodes have none: then sockets are all there is.
    """
    sockets = report.sockets_between
    evidence = _evidence(report, plan) if sockets else None
    if evidence is None:
        return None
    where = f" ({', '.join(report.interfaces)})" if report.interfaces else ""
    return (
        f"NCCL carries traffic between {_pair(sockets)} over sockets{where} although {evidence}: "
        f"{_cause(report, plan, folder)}"
    )


def host_memory_warning(report: NcclReport, *, plan: Plan) -> str | None:
    """What is wrong where adapters cannot reach device memory although the plan counts on it.

    Only receivers are looked at: with some PCIe topologies NCCL sends through host memory by its
    own choice (NVIDIA/nccl issue 392).
    """
    if not plan.cluster.gpudirect:
        return None
    receivers = [
        one
        for one in report.between
        if one.end == "receive" and one.network is not None and not report.over_sockets(one)
    ]
    without = [one for one in receivers if not one.gpudirect]
    if not without:
        return None
    return (
        f"{len(without)} of {len(receivers)} connections that NCCL receives by from other nodes "
        f"pass through host memory (between {_pair(tuple(without))}), although the plan counts on "
        f"GPUDirect: {PEER_MEMORY[plan.cluster.device.vendor]}"
    )


def _evidence(report: NcclReport, plan: Plan) -> str | None:
    """Who says that there are RDMA adapters."""
    if has_sockets_only(plan):
        return None
    planned, network = adapter_words(plan), plan.cluster.network
    if planned is not None:
        return planned if network is None else f"{planned} ({network.evidence})"
    verbs = {(one.host, one.name) for one in report.adapters if one.link_layer is not None}
    if verbs:
        host = min(verbs)[0]
        names = sorted(name for place, name in verbs if place == host)
        return f"NCCL itself found {', '.join(names)} on {host}"
    return "libfabric chose EFA on some ranks" if "efa" in report.providers else None


def _cause(report: NcclReport, plan: Plan, folder: Path) -> str:
    """The likeliest reason and what to do about it, from what NCCL said."""
    for value in report.values_of("NCCL_IB_DISABLE"):
        if value != "0":
            return f"NCCL_IB_DISABLE={value} is set, so unset it"
    if "Socket" in report.values_of("NCCL_NET"):
        return "NCCL_NET=Socket is set, so unset it"
    if report.complains("no_verbs"):
        return "libibverbs is not installed where the ranks run, so install rdma-core there"
    plugin = PLUGINS.get(_transport(plan))
    if plugin is not None and report.complains("no_plugin"):
        return f"the plugin of NCCL ({plugin}, libnccl-net.so) was not found on LD_LIBRARY_PATH"
    if report.providers and "efa" not in report.providers:
        providers = ", ".join(report.providers)
        return f"libfabric chose {providers}, so set FI_PROVIDER=efa and look at fi_info -p efa"
    if report.complains("no_device"):
        for value in report.values_of("NCCL_IB_HCA"):
            return f"NCCL_IB_HCA={value} matches no adapter that is up, so correct or unset it"
        return (
            "NCCL found no adapter that is up, so look at ibv_devinfo on the nodes and whether "
            "the container has /dev/infiniband"
        )
    return f"look at Using network and NET/ in {folder}"


def _transport(plan: Plan) -> str:
    network = plan.cluster.network
    if network is not None:
        return network.transport
    levels = levels_between(plan)
    return levels[0].name if levels else ""


def _pair(connections: tuple[Connection, ...]) -> str:
    """Two hosts, such as `n01 and n02`."""
    pairs = {
        tuple(sorted((one.host, one.peer_host))) for one in connections if one.peer_host is not None
    }
    if not pairs:
        return f"{connections[0].host} and other nodes"
    return " and ".join(min(pairs))
