"""Network: what a launch must know of the nodes' network; found on them, or said in a profile.

Everything that is unknown stays None, and nothing is set for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.checks import require_choice

PciPath = Literal["pix", "pxb", "phb", "node", "sys"]
"""Way between two PCIe devices as NCCL and `nvidia-smi topo` name it, nearest first: one switch,
several switches, one host bridge, one NUMA node, the link between sockets."""
GpuDirect = Literal["peermem", "dmabuf", "none"]
"""How adapters may read device memory: the nvidia-peermem module, the kernel's DMA-BUF with the
open driver, or not at all."""
Transport = Literal["infiniband", "roce", "efa", "tcpx", "tcpxo", "gib", "ethernet"]
"""What carries data between nodes: verbs over InfiniBand or RoCE, AWS's EFA, Google's GPUDirect
stacks (TCPX of a3-high, TCPXO of a3-mega, gIB of a3-ultra and later), or plain sockets."""
VERBS: tuple[Transport, ...] = ("infiniband", "roce")
"""What NCCL's own transport drives; the others bring a plugin or are sockets."""
Provider = Literal["aws", "gcp", "azure", "oci", "coreweave", "lambda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between nodes, the same on all of them unless a field says otherwise."""

    transport: Transport
    """What carries data between nodes."""
    evidence: str
    """Who says so: `found on n01 by fsdpplan detect, 2026-11-22`, or the profile's source."""
    hcas: tuple[str, ...] = ()
    """Adapter ports of the compute fabric, such as `mlx5_0` or `mlx5_0:1`; empty: unknown, or all
    adapters belong to it."""
    hcas_left_out: tuple[str, ...] = ()
    """Adapters that do not belong to it: storage, management, another link layer, or down."""
    hcas_differ: bool = False
    """Nodes name their adapters differently, so that one list cannot serve all."""
    gid_index: int | None = None
    """Of RoCE: the entry with RoCE v2 and an IPv4 address, on all ports and nodes."""
    traffic_class: int | None = None
    """Of RoCE: what the operator of the fabric says; it cannot be read off a node."""
    socket_interface: str | None = None
    """The interface that routes between the nodes, on all of them."""
    socket_interfaces_left_out: tuple[str, ...] = ()
    """Interfaces that are up but do not lead to other nodes (docker0, virbr0, another subnet)."""
    gpudirect: GpuDirect | None = None
    """How adapters may read device memory, as far as that was found. Whether they do, as it is
    priced and launched, the levels of the cluster say (`Cluster.gpudirect`)."""
    gpudirect_path: PciPath | None = None
    """Farthest way between a GPU and the port that serves it."""
    rails: int | None = None
    """Ports of a node that lead to switches of their own (rail-optimised); None: unknown."""
    nvlink_switch: bool | None = None
    """The GPUs of a node hang on switches that can reduce (NVLS: H100 and later)."""
    provider: Provider | None = None
    """The cloud, by evidence."""
    instance_type: str | None = None
    """The cloud's name of the machine, such as `p5.48xlarge`."""
    net_plugins: tuple[str, ...] = ()
    """Files of NCCL network plugins on the nodes."""
    env_profiles: tuple[str, ...] = ()
    """Scripts of the cloud that set NCCL's variables."""
    nccl_version: str | None = None
    """NCCL of the nodes' torch, such as `2.27.3`."""

    def __post_init__(self) -> None:
        require_choice("transport", self.transport, get_args(Transport))
        names = (
            *self.hcas,
            *self.hcas_left_out,
            *self.socket_interfaces_left_out,
            *([] if self.socket_interface is None else [self.socket_interface]),
        )
        for name in names:
            if not name or not name.isascii() or set(name) & set(" ,=^\"'\\$`;\n\t"):
                raise SpecError(
                    f"{name!r} is no name of an adapter or interface: write one such as mlx5_0"
                )
        for path in (*self.net_plugins, *self.env_profiles):
            if not path.startswith("/") or not path.isprintable():
                raise SpecError(
                    f"{path!r} is no absolute path of a file on the nodes: write it from / on"
                )
        if self.gid_index is not None and not 0 <= self.gid_index < 256:
            raise SpecError(f"gid_index must lie in [0, 256), not {self.gid_index}")
        if self.traffic_class is not None and not 0 <= self.traffic_class < 256:
            raise SpecError(f"traffic_class must lie in [0, 256), not {self.traffic_class}")
