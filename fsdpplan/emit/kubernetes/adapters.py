"""The network adapters that a pod asks for, and what it needs beside them.

Where a cloud has one name for its adapters the plan's profile says how many there are, and they are
asked for by default. Elsewhere the cluster's own device plugin names them, and it is said what to
type.

Sources: docs.aws.amazon.com/eks/latest/userguide/node-efa.html (the resource, huge pages: nodes
with the EFA driver set 5,128 pages of 2 MiB aside, and a pod takes 5,120 MiB);
kubernetes.io/docs/tasks/manage-hugepages/scheduling-hugepages; azure.github.io/aks-rdma-infiniband,
"SR-IOV Device Plugin" and "RDMA Shared Device Plugin" (rdma/ib, rdma/shared_ib).
"""

from __future__ import annotations

from fsdpplan.emit.pods import Pods, rdma_resources
from fsdpplan.spec.plan import Plan

EFA = "vpc.amazonaws.com/efa"
"""What AWS's device plugin calls an adapter; each has to be asked for."""

HUGE_PAGES = {"hugepages-2Mi": "5120Mi"}
"""Of the 5,128 that EFA's driver sets aside on a node."""

_OTHERWISE = {
    "azure": "on AKS add --rdma rdma/ib={ports} where the SR-IOV device plugin names them so, or "
    "--rdma rdma/shared_ib=1 with the shared one",
    "gcp": "on GKE the pods need what Google's guide to this machine type says of its networks, by "
    "--annotation and --volumes",
}
"""Provider -> what to do, where its adapters have no name that is the same everywhere."""

_ANYWHERE = "add --rdma RESOURCE=N as kubectl describe node names them, or --host-network"


def adapter_resources(plan: Plan, pods: Pods) -> dict[str, str]:
    """Extended resource -> how many a pod: those of `--rdma`, else those that the plan's network
    has by one name everywhere."""
    return rdma_resources(pods) or _usual(plan, pods)


def _usual(plan: Plan, pods: Pods) -> dict[str, str]:
    cluster = plan.cluster
    if cluster.nodes == 1 or cluster.network is None or pods.host_network:
        return {}
    return {EFA: str(cluster.levels[-1].ports)} if cluster.network.transport == "efa" else {}


def beside_adapters(asked: dict[str, str]) -> dict[str, str]:
    """What a pod with these adapters takes of its node, too."""
    return HUGE_PAGES if EFA in asked else {}


def adapter_words(plan: Plan, pods: Pods) -> str | None:
    """What the pods ask for by default, or what is to be asked for: one sentence for the manifest
    and for stderr; None where there is nothing to say."""
    cluster = plan.cluster
    if cluster.nodes == 1 or cluster.network is None or pods.rdma or pods.host_network:
        return None
    transport, ports = cluster.network.transport, cluster.levels[-1].ports
    if transport == "ethernet":
        return None
    if asked := _usual(plan, pods):
        words = " and ".join(f"{name}={count}" for name, count in {**asked, **HUGE_PAGES}.items())
        return (
            f"each pod asks for {words} and for IPC_LOCK, as {cluster.name} has {ports} EFA "
            "adapters a node (--rdma sets another number)"
        )
    what = _OTHERWISE.get(cluster.network.provider or "", _ANYWHERE).format(ports=ports)
    return (
        f"the plan counts on {transport}, and no --rdma asks for its adapters: without them NCCL "
        f"goes over sockets, far slower; {what}"
    )
