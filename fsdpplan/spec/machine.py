"""Machine: one host as its drivers and its kernel describe it, before anything is concluded.

What a machine does not say is None: unknown is never a default. Bandwidths are one direction.
PCI addresses are written as sysfs has them (`0000:1b:00.0`), interfaces and adapters by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.spec.nodes import GpuDirect as GpuDirect
from fsdpplan.spec.nodes import PciPath as PciPath

UNLIMITED_BYTES = 2**63 - 1
"""What a limit without a limit is."""

NvLinkRemote = Literal["gpu", "switch", "cpu"]
P2pStatus = Literal["ok", "chipset", "gpu", "topology", "disabled", "not_supported"]
"""What NVML says of reading a peer's memory; all but `ok` name what stands in the way."""
Ancestor = Literal["internal", "single", "multiple", "hostbridge", "node", "system"]
"""Nearest common ancestor of two GPUs as NVML names it: one board, one PCIe switch, several
switches, one host bridge, one NUMA node, or the link between sockets."""
LinkLayer = Literal["infiniband", "ethernet", "efa", "unspecified"]
PortState = Literal["active", "down", "init", "armed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of a GPU."""

    link: int
    """Its number on the GPU."""
    active: bool
    version: int | None
    """NVLink generation: 2 (V100), 3 (A100), 4 (H100), 5 (B200)."""
    bandwidth_bytes_per_second: float | None
    """One direction of this link."""
    remote: NvLinkRemote | None
    """What is at the other end."""
    remote_bus_id: str | None
    """PCI address of the other end, where it is a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFabric:
    """The multi-node NVLink domain (NVL72) that a GPU has joined."""

    cluster_uuid: str
    """The same on all GPUs of one domain."""
    clique: int
    """GPUs of one domain reach each other only inside one clique."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigDevice:
    """One MIG instance of a GPU, which CUDA shows as a device of its own."""

    name: str
    """Profile, such as `MIG 3g.40gb`."""
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU."""

    index: int
    """Its number in the driver."""
    name: str
    """Product name, such as `NVIDIA H100 80GB HBM3`."""
    uuid: str | None
    bus_id: str | None
    """PCI address."""
    memory_bytes: int | None
    """All memory of the board; torch sees a little less."""
    compute_capability: str | None
    """Such as `9.0`."""
    power_limit_watts: float | None
    """The cap that holds now."""
    default_power_limit_watts: float | None
    """The cap that the product comes with."""
    max_sm_clock_hertz: float | None
    max_memory_clock_hertz: float | None
    ecc_enabled: bool | None
    mig_enabled: bool | None
    mig_devices: tuple[MigDevice, ...]
    pcie_generation: int | None
    """Generation of the link now; a GPU that does nothing may show a lower one to save power."""
    pcie_width: int | None
    """Lanes of the link now."""
    pcie_max_generation: int | None
    """What GPU and slot can do together."""
    pcie_max_width: int | None
    numa_node: int | None
    cpu_affinity: str | None
    """Near cores, as in `0-55,112-167`."""
    nvlinks: tuple[NvLink, ...]
    """Empty where the GPU has none; links that are down are listed, too."""
    fabric: GpuFabric | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
    """Two GPUs, by their index, the lower one first."""

    first: int
    second: int
    p2p: P2pStatus | None
    ancestor: Ancestor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One entry of an adapter's GID table."""

    index: int
    kind: str
    """`IB/RoCE v1` or `RoCE v2`, as sysfs says."""
    gid: str
    interface: str | None
    """The Ethernet interface that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One port of an RDMA adapter (InfiniBand, RoCE or EFA)."""

    name: str
    """Device name, such as `mlx5_0` or `rdmap16s27`."""
    port: int
    """Port number, from 1."""
    link_layer: LinkLayer | None
    state: PortState | None
    rate_bytes_per_second: float | None
    """Rate that the port negotiated."""
    firmware: str | None
    bus_id: str | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_generation: int | None
    pcie_max_width: int | None
    numa_node: int | None
    interface: str | None
    """The network interface on top of it, such as `ib0` or `ens10np0`."""
    gids: tuple[Gid, ...]
    virtual_function: bool | None
    """It is one function of a shared adapter (SR-IOV)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface of the kernel, loopback left out."""

    name: str
    up: bool | None
    speed_bytes_per_second: float | None
    driver: str | None
    """Kernel module, such as `mlx5_core`, `ena`, `gve`."""
    bus_id: str | None
    """None for a virtual one (docker0, veth, bond)."""
    numa_node: int | None
    networks: tuple[str, ...]
    """Networks that its addresses lie in, such as `10.1.0.0/16`; never an address itself."""
    default_route: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """One PCIe bridge (switch port) whose access control is on, which sends peers' traffic up to
    the host."""

    bus_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """CPU, memory and limits."""

    name: str
    kernel: str | None
    cpu: str | None
    """Model name."""
    sockets: int | None
    cores: int | None
    """Logical cores."""
    numa_nodes: int | None
    memory_bytes: int | None
    locked_memory_bytes: int | None
    """Most that one process may lock; `UNLIMITED_BYTES` for no limit."""
    shared_memory_bytes: int | None
    """Size of /dev/shm."""
    hugepage_bytes: int | None
    """Memory set aside for huge pages."""
    gpudirect: GpuDirect | None
    acs_bridges: tuple[Bridge, ...] | None
    """Bridges with access control on; None where the machine does not let us read that."""
    iommu: bool | None
    """The kernel translates the addresses of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions, as texts."""

    driver: str | None
    cuda: str | None
    """Newest CUDA that the driver supports."""
    torch: str | None
    nccl: str | None
    """The one that torch comes with."""
    net_plugins: tuple[str, ...]
    """Files of NCCL network plugins that were found, such as
    `/opt/amazon/ofi-nccl/lib/libnccl-net.so`."""
    env_profiles: tuple[str, ...]
    """Scripts of the cloud that set NCCL's variables, such as
    `/usr/local/gib/scripts/set_nccl_env.sh`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """What Slurm says of this host or of the allocation around us."""

    version: str | None
    job_id: str | None
    nodes: tuple[str, ...]
    """Nodes of the allocation; empty outside of one."""
    gres: str | None
    """Generic resources of this node, such as `gpu:h100:8`."""
    given_gpus: int | None
    """GPUs of this node that the job around us was given."""
    partition: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """The cloud that this host stands in, by what it shows."""

    provider: Literal["aws", "gcp", "azure", "oci", "coreweave", "lambda"]
    instance_type: str | None
    """Such as `p5.48xlarge`."""
    evidence: str
    """What said so, such as `/sys/class/dmi/id/sys_vendor: Amazon EC2`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that was read of one host."""

    host: Host
    software: Software
    gpus: tuple[Gpu, ...]
    pairs: tuple[GpuPair, ...]
    nics: tuple[Nic, ...]
    interfaces: tuple[Interface, ...]
    pci_paths: tuple[tuple[str, tuple[str, ...]], ...]
    """(PCI address, its way down from the host bridge: `pci0000:15`, `0000:15:01.0`, ..., itself)
    of every GPU and adapter."""
    slurm: Slurm | None
    kubernetes: bool
    """We run inside of a pod."""
    cloud: Cloud | None
    other_accelerators: tuple[str, ...]
    """Accelerators that fsdpplan cannot plan for, in words, such as `8 AMD GPUs (gfx942)`."""
    unread: tuple[str, ...]
    """What could not be read, in words: a command that failed, a file without permission."""
