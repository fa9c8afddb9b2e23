"""Rules of the network between nodes: adapters, interfaces, rails, GPUDirect.

RCCL is NCCL's relative: it reads the names of interfaces, adapters, GID entry and traffic class
under the same names (ROCm/rccl src/transport/net_ib.cc), and those rules hold for it, too.
"""

from __future__ import annotations

import re

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.rules import (
    NCCL_GUIDE,
    ChosenValue,
    Rule,
    levels_between_nodes,
    library_of,
    nccl_release,
    network_between,
    verbs_between,
)
from fsdpplan.spec.nodes import Network
from fsdpplan.spec.plan import Plan
from fsdpplan.units import format_bit_bandwidth

CHOOSES_GID = (2, 21)
"""NCCL's first release that finds the GID itself (v2.21.5-1, net_ib.cc: IB_GID_INDEX is -1)."""
C2C_BY_REQUEST = (2, 26)
"""NCCL's only release that reads NCCL_NET_GDR_C2C and leaves it off (v2.26.2-1, paths.cc)."""
THROUGH_HOST = (
    "data between nodes passes through host memory and is priced so: the cluster says that its "
    "adapters cannot read device memory (nvidia-peermem, DMA-BUF)"
)
LEVEL_OF_PATH = {"phb": "PHB", "node": "PHB", "sys": "SYS"}
"""Name that NCCL gives the ways that are farther than its default: `node` is no name of its own."""


def _adapters(plan: Plan, job: Job) -> ChosenValue | str:
    network = verbs_between(plan, rccl=True)
    if isinstance(network, str):
        return network
    if network.hcas_differ:
        return (
            "the nodes name their adapters differently, so no one list is right on all of them: "
            "give them the same names by udev, or list each node's own in its /etc/nccl.conf"
        )
    library = library_of(plan.cluster.device)
    if not network.hcas_left_out:
        return f"no adapter is known that is outside the compute fabric, and {library} takes all"
    if not network.hcas:
        return "which adapters belong to the compute fabric is not known"
    count, others = len(network.hcas), network.hcas_left_out
    return ChosenValue(
        value="=" + ",".join(network.hcas),
        reason=f"{count} of {count + len(others)} adapters are of the compute fabric, and "
        f"{library} would take all that are up: {_listed(others)} not; the list is the same on all "
        "ranks",
    )


def _listed(names: tuple[str, ...]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def _gid(plan: Plan, job: Job) -> ChosenValue | str:
    network = _roce(plan)
    if isinstance(network, str):
        return network
    release = nccl_release(network.nccl_version)
    if release is None or release >= CHOOSES_GID:
        return "NCCL >= 2.21 finds the entry with RoCE v2 over IPv4 itself"
    if network.gid_index is None:
        return "no entry is known with RoCE v2 over IPv4 on all ports and nodes"
    return ChosenValue(
        value=str(network.gid_index),
        reason=f"entry {network.gid_index} of the GID tables is RoCE v2 over IPv4 on all ports, "
        f"and {library_of(plan.cluster.device)} {network.nccl_version} would take entry 0",
    )


def _traffic_class(plan: Plan, job: Job) -> ChosenValue | str:
    network = _roce(plan)
    if isinstance(network, str):
        return network
    if network.traffic_class is None:
        return "which traffic class is lossless is for the fabric's operator to say"
    return ChosenValue(
        value=str(network.traffic_class),
        reason=f"the fabric's operator keeps traffic class {network.traffic_class} lossless, and "
        f"{library_of(plan.cluster.device)} would send with 0",
    )


def _roce(plan: Plan) -> Network | str:
    network = verbs_between(plan, rccl=True)
    if isinstance(network, Network) and network.transport != "roce":
        return "it is for RoCE only, and the nodes are joined by InfiniBand"
    return network


def _socket_interface(plan: Plan, job: Job) -> ChosenValue | str:
    library = library_of(plan.cluster.device)
    chooses = f"{library} takes ib* first, then whatever is up"
    return _interface(plan, prefix="=", chooses=chooses)


def _gloo_interface(plan: Plan, job: Job) -> ChosenValue | str:
    if plan.cluster.device.kind == "cpu":
        return ChosenValue(
            value="lo",
            reason="where all ranks are on one host, gloo needs no other interface, and no name "
            "of the host",
            on_node=True,
        )
    return _interface(plan, prefix="", chooses="gloo takes what the host's name resolves to")


def _interface(plan: Plan, *, prefix: str, chooses: str) -> ChosenValue | str:
    network = network_between(plan, rccl=True)
    if isinstance(network, str):
        return network
    name, others = network.socket_interface, network.socket_interfaces_left_out
    if name is None:
        return "which interface routes between the nodes is not known"
    if not others:
        return f"{name} routes between the nodes, and no other is known that may be taken for it"
    return ChosenValue(
        value=f"{prefix}{name}",
        reason=f"{name} routes between the nodes; {_listed(others)} up, too, and {chooses}",
    )


def _gpudirect_level(plan: Plan, job: Job) -> ChosenValue | str:
    """Beyond PCIe switches NCCL stages in host memory, which is mostly right.

    Source: NCCL v2.30.7-1 src/graph/paths.cc, ncclTopoCheckGdr (PXB unless set); maintainers in
    github.com/NVIDIA/nccl issues 465 and 1151 (a CPU's host bridge is the slower way); Azure's
    virtual machines, which hide the switches: github.com/Azure/aks-rdma-infiniband pull 36.
    """
    network = verbs_between(plan)
    if isinstance(network, str):
        return network
    path = network.gpudirect_path
    if not plan.cluster.gpudirect:
        return THROUGH_HOST
    if path is None:
        return "how far GPUs and adapters are apart is not known"
    if path not in LEVEL_OF_PATH:
        return "GPUs and adapters are joined by PCIe switches, within NCCL's own limit (PXB)"
    if network.provider != "azure":
        return (
            f"GPU and adapter meet at a host bridge or farther ({path}), where staging in host "
            "memory is mostly faster, as NCCL does by itself: set it only after measuring"
        )
    return ChosenValue(
        value=LEVEL_OF_PATH[path],
        reason=f"adapters read device memory{_way(network)}, but the virtual machine hides the "
        f"PCIe switches: GPU and adapter look as far as {path}, and NCCL stops at PXB",
    )


def _way(network: Network) -> str:
    return "" if network.gpudirect is None else f" ({network.gpudirect})"


def _gpudirect_c2c(plan: Plan, job: Job) -> ChosenValue | str:
    """Source: NCCL tags v2.26.2-1 and v2.27.3-1, src/graph/paths.cc; github.com/NVIDIA/nccl
    issue 1579 for what it gains."""
    network = verbs_between(plan)
    if isinstance(network, str):
        return network
    if not re.match(r"g[hb]\d", plan.cluster.device.name):
        return "it is for GPUs that hang on their CPU by NVLink-C2C (GH200, GB200)"
    if not plan.cluster.gpudirect:
        return THROUGH_HOST
    if nccl_release(network.nccl_version) != C2C_BY_REQUEST:
        return "NCCL >= 2.27 does it by itself"
    return ChosenValue(
        value="1",
        reason=f"adapters reach {plan.cluster.device.name} through its CPU's NVLink-C2C, which "
        f"NCCL {network.nccl_version} uses for GPUDirect only when asked",
    )


def _cross_nic(plan: Plan, job: Job) -> ChosenValue | str:
    """Source: NCCL user guide, NCCL_CROSS_NIC; NCCL tag v2.20.3-1 src/graph/connect.cc, which
    alternates rings so that the default (2) keeps to the rails."""
    network = verbs_between(plan)
    if isinstance(network, str):
        return network
    if network.rails is None or network.rails < 2:
        return "no rails are known (ports of a node that lead to switches of their own)"
    shares = [share for _, share in levels_between_nodes(plan.cluster)]
    if len(shares) < 2 or shares[-1] >= shares[0]:
        return (
            f"nothing says that crossing the {network.rails} rails is slower, and by default NCCL "
            ">= 2.20 alternates its rings so that they keep to rails"
        )
    return ChosenValue(
        value="0",
        reason=f"each of {network.rails} ports leads to a switch of its own; across these a GPU "
        f"gets {format_bit_bandwidth(shares[-1])}, within a rail "
        f"{format_bit_bandwidth(shares[0])}",
    )


FABRIC_RULES: tuple[Rule, ...] = (
    Rule(
        name="NCCL_SOCKET_IFNAME",
        kind="sockets",
        when="the interface that routes between the nodes is known, and others are up",
        versions="NCCL, all versions",
        source=NCCL_GUIDE,
        decide=_socket_interface,
    ),
    Rule(
        name="GLOO_SOCKET_IFNAME",
        kind="sockets",
        when="as above; `lo` for CPU ranks that are all on one host",
        versions="torch, all versions",
        source="pytorch torch/csrc/distributed/c10d/init.cpp",
        decide=_gloo_interface,
    ),
    Rule(
        name="NCCL_IB_HCA",
        kind="fabric",
        when="some adapters are not of the compute fabric, and nodes name them alike",
        versions="NCCL >= 2.5.6 (the leading =)",
        source=NCCL_GUIDE,
        decide=_adapters,
    ),
    Rule(
        name="NCCL_IB_GID_INDEX",
        kind="fabric",
        when="RoCE, the entry is known, and the nodes' NCCL is known to be older than 2.21",
        versions="NCCL < 2.21",
        source="NCCL v2.21.5-1 src/transport/net_ib.cc",
        decide=_gid,
    ),
    Rule(
        name="NCCL_IB_TC",
        kind="fabric",
        when="RoCE, and the cluster's file gives the operator's traffic class",
        versions="NCCL >= 2.1.15",
        source=NCCL_GUIDE,
        decide=_traffic_class,
    ),
    Rule(
        name="NCCL_NET_GDR_LEVEL",
        kind="fabric",
        when="the plan counts on GPUDirect, and a virtual machine of Azure shows GPU and adapter "
        "farther apart than PXB",
        versions="NCCL >= 2.6.4 (levels by name)",
        source="https://github.com/Azure/aks-rdma-infiniband/pull/36",
        decide=_gpudirect_level,
    ),
    Rule(
        name="NCCL_NET_GDR_C2C",
        kind="fabric",
        when="GH200 or GB200, the plan counts on GPUDirect, and the nodes' NCCL is known to be "
        "2.26",
        versions="NCCL 2.26",
        source="https://github.com/NVIDIA/nccl/issues/1579",
        decide=_gpudirect_c2c,
    ),
    Rule(
        name="NCCL_CROSS_NIC",
        kind="fabric",
        when="rails are known, and an outer level gives a GPU less than the level of the rails",
        versions="NCCL, all versions",
        source=NCCL_GUIDE,
        decide=_cross_nic,
    ),
)
