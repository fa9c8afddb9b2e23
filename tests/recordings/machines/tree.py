"""A host under construction: what its kernel and its drivers would show, part by part.

Only what `topology/read/places.py` reads is written down, in the form in which it is kept.
Parts are given by their PCI chains: `pci0000:15/0000:15:01.0/.../0000:1b:00.0`, as under
/sys/devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

GIGATRANSFERS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
"""PCIe generation -> rate as sysfs writes it."""
P2P_OK, P2P_GPU_NOT_SUPPORTED = 0, 2
REMOTE_GPU, REMOTE_SWITCH = 0, 2


@dataclass(frozen=True, kw_only=True)
class Product:
    """One GPU model, by what NVML says of it."""

    name: str
    memory_mebibytes: int
    capability: tuple[int, int]
    watts: int
    device: str
    """PCI device id."""
    sm_megahertz: int | None = None
    memory_megahertz: int | None = None
    generation: int = 5
    ecc: int | None = 1
    mig: int | None = 0
    nvlink_version: int | None = None
    """NVML's number (nvmlNvlinkVersion_t): 5 is NVLink 3.1, 6 is 4.0, 7 is 5.0."""
    nvlink_megabytes_per_second: int | None = None


A100_80G = Product(
    name="NVIDIA A100-SXM4-80GB",
    memory_mebibytes=81920,
    capability=(8, 0),
    watts=400,
    device="0x20b2",
    sm_megahertz=1410,
    memory_megahertz=1593,
    generation=4,
    nvlink_version=5,
    nvlink_megabytes_per_second=25000,
)
A100_40G = replace(
    A100_80G,
    name="NVIDIA A100-SXM4-40GB",
    memory_mebibytes=40960,
    device="0x20b0",
    memory_megahertz=1215,
)
A100_PCIE = replace(
    A100_80G,
    name="NVIDIA A100 80GB PCIe",
    watts=300,
    device="0x20b5",
    memory_megahertz=1512,
)
H100 = Product(
    name="NVIDIA H100 80GB HBM3",
    memory_mebibytes=81559,
    capability=(9, 0),
    watts=700,
    device="0x2330",
    sm_megahertz=1980,
    memory_megahertz=2619,
    nvlink_version=6,
    nvlink_megabytes_per_second=26562,
)
GB200 = Product(
    name="NVIDIA GB200",
    memory_mebibytes=189471,
    capability=(10, 0),
    watts=1200,
    device="0x2941",
    nvlink_version=7,
    nvlink_megabytes_per_second=53125,
)
RTX_4090 = Product(
    name="NVIDIA GeForce RTX 4090",
    memory_mebibytes=24564,
    capability=(8, 9),
    watts=450,
    device="0x2684",
    sm_megahertz=3105,
    memory_megahertz=10501,
    generation=4,
    ecc=0,
    mig=None,
)
L40S = Product(
    name="NVIDIA L40S",
    memory_mebibytes=46068,
    capability=(8, 9),
    watts=350,
    device="0x26b9",
    sm_megahertz=2520,
    memory_megahertz=9001,
    generation=4,
    mig=None,
)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One function of an RDMA adapter."""

    name: str
    chain: str
    rate: str = "400 Gb/sec (4X NDR)"
    link_layer: str = "InfiniBand"
    firmware: str = "28.39.2048"
    state: str = "4: ACTIVE"
    numa: int = 0
    generation: int = 5
    width: int = 16
    driver: str = "mlx5_core"
    vendor: str = "0x15b3"
    device: str = "0x1021"
    interface: str | None = None
    gids: tuple[tuple[str, str], ...] = ()
    """(kind, GID in the form that is kept) from entry 0 on."""


@dataclass(kw_only=True)
class Tree:
    """A recording that grows."""

    about: str
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    driver: str = "570.86.15"
    cuda: str = "12.8"
    gpus: list[dict[str, Any]] = field(default_factory=list)
    chains: list[str] = field(default_factory=list)
    """Of `gpus`, in their order."""
    p2p: int = P2P_OK
    nvml_error: str | None = None
    routes: list[tuple[str, str, str]] = field(default_factory=list)
    """(interface, destination, mask) in the kernel's hexadecimal words."""

    def host(
        self,
        name: str,
        *,
        cpu: str = "Intel(R) Xeon(R) Platinum 8480CL",
        vendor: str = "GenuineIntel",
        architecture: str = "x86_64",
        sockets: int = 2,
        cores: int = 56,
        threads: int = 2,
        numa_nodes: int = 2,
        memory_gibibytes: int = 2015,
    ) -> None:
        """CPU, memory and the limits of a host that is set up for training."""
        logical = sockets * cores * threads
        self.files["/proc/sys/kernel/hostname"] = f"{name}\n"
        self.files["/proc/sys/kernel/osrelease"] = "5.15.0-1053-nvidia\n"
        self.files["/proc/cmdline"] = "iommu=pt\n"
        self.files["/proc/meminfo"] = (
            f"MemTotal:       {memory_gibibytes * 2**20} kB\n"
            "HugePages_Total:       0\nHugePages_Free:        0\n"
            "Hugepagesize:       2048 kB\nHugetlb:               0 kB\n"
        )
        self.limits(locked="unlimited")
        self.files["/sys/devices/system/cpu/online"] = f"0-{logical - 1}\n"
        nodes = "0" if numa_nodes == 1 else f"0-{numa_nodes - 1}"
        self.files["/sys/devices/system/node/online"] = f"{nodes}\n"
        self.files["/sys/devices/system/node/has_cpu"] = f"{nodes}\n"
        self.commands["lscpu"] = (
            f"Architecture:                       {architecture}\n"
            f"CPU(s):                             {logical}\n"
            f"On-line CPU(s) list:                0-{logical - 1}\n"
            f"Vendor ID:                          {vendor}\n"
            f"Model name:                         {cpu}\n"
            f"Thread(s) per core:                 {threads}\n"
            f"Core(s) per socket:                 {cores}\n"
            f"Socket(s):                          {sockets}\n"
            f"NUMA node(s):                       {numa_nodes}\n"
        )
        shared = memory_gibibytes * 2**30 // 2
        self.commands["df -B1 --output=size /dev/shm"] = f"    1B-blocks\n{shared}\n"
        self.failed["scontrol version"] = "not found"

    def limits(self, *, locked: str) -> None:
        """What /proc/self/limits says of locked memory."""
        self.files["/proc/self/limits"] = (
            f"{'Limit':<26}{'Soft Limit':<21}{'Hard Limit':<21}{'Units':<10}\n"
            f"{'Max open files':<26}{'1048576':<21}{'1048576':<21}{'files':<10}\n"
            f"{'Max locked memory':<26}{locked:<21}{locked:<21}{'bytes':<10}\n"
        )

    def software(
        self,
        *,
        gpudirect: bool = True,
        open_module: bool = True,
        torch: str = "2.9.1",
        nccl: str = "2.27.5",
    ) -> None:
        """The NVIDIA driver with or without nvidia-peermem, and torch with its NCCL."""
        module = "Open Kernel Module for x86_64" if open_module else "x86_64 Kernel Module"
        self.files["/proc/driver/nvidia/version"] = (
            f"NVRM version: NVIDIA UNIX {module}  {self.driver}  Release Build\n"
            "GCC version:  gcc version 12.3.0\n"
        )
        if gpudirect:
            self.files["/sys/module/nvidia_peermem/version"] = f"{self.driver}\n"
        self.packages |= {"torch": torch, "nvidia-nccl-cu12": nccl, "nvidia-ml-py": "12.570.86"}

    def pci(
        self,
        chain: str,
        *,
        kind: str,
        vendor: str,
        device: str,
        numa: int,
        generation: int,
        width: int,
        max_generation: int | None = None,
        max_width: int | None = None,
    ) -> None:
        """One PCI device, and what its link does now and can do."""
        folder = f"/sys/bus/pci/devices/{chain.rpartition('/')[2]}"
        best = GIGATRANSFERS[max_generation or generation]
        self.links[folder] = f"/sys/devices/{chain}"
        self.files |= {
            f"{folder}/class": f"{kind}\n",
            f"{folder}/vendor": f"{vendor}\n",
            f"{folder}/device": f"{device}\n",
            f"{folder}/numa_node": f"{numa}\n",
            f"{folder}/current_link_speed": f"{GIGATRANSFERS[generation]} GT/s PCIe\n",
            f"{folder}/current_link_width": f"{width}\n",
            f"{folder}/max_link_speed": f"{best} GT/s PCIe\n",
            f"{folder}/max_link_width": f"{max_width or width}\n",
        }

    def gpu(
        self,
        product: Product,
        chain: str,
        *,
        numa: int = 0,
        affinity: str | None = None,
        generation: int | None = None,
        width: int = 16,
        max_width: int = 16,
    ) -> dict[str, Any]:
        """One NVIDIA GPU as NVML tells of it; `affinity` as in `0-55,112-167`."""
        index, address = len(self.gpus), chain.rpartition("/")[2]
        self.pci(
            chain,
            kind="0x030200",
            vendor="0x10de",
            device=product.device,
            numa=numa,
            generation=generation or product.generation,
            width=width,
            max_generation=product.generation,
            max_width=max_width,
        )
        told = {
            "index": index,
            "name": product.name,
            "uuid": f"GPU-{index:08x}-0000-4000-8000-{int(address[5:7], 16):012x}",
            "bus_id": f"0000{address}".upper(),
            "memory_bytes": product.memory_mebibytes * 2**20,
            "compute_capability": list(product.capability),
            "power_limit_milliwatts": product.watts * 1000,
            "default_power_limit_milliwatts": product.watts * 1000,
            "max_sm_clock_megahertz": product.sm_megahertz,
            "max_memory_clock_megahertz": product.memory_megahertz,
            "ecc": product.ecc,
            "mig": product.mig,
            "pcie_generation": generation or product.generation,
            "pcie_width": width,
            "pcie_max_generation": product.generation,
            "pcie_max_width": max_width,
            "numa_node": numa,
            "cpu_affinity": None if affinity is None else words(affinity),
        }
        gpu = {key: value for key, value in told.items() if value is not None}
        self.gpus.append(gpu)
        self.chains.append(chain)
        return gpu

    def nvlinks(self, gpu: int, product: Product, remotes: list[tuple[int, str]]) -> None:
        """Links of one GPU, each (what is at its other end, PCI address of that)."""
        self.gpus[gpu]["nvlinks"] = [
            {
                "link": link,
                "state": 1,
                "version": product.nvlink_version,
                "remote_type": remote,
                "remote_bus_id": address,
                "speed_megabytes_per_second": product.nvlink_megabytes_per_second,
            }
            for link, (remote, address) in enumerate(remotes)
        ]

    def switched(self, product: Product, *, links: int, switches: tuple[str, ...]) -> None:
        """All GPUs on NVSwitches, their links spread over these."""
        for gpu in range(len(self.gpus)):
            ends = [(REMOTE_SWITCH, switches[link % len(switches)]) for link in range(links)]
            self.nvlinks(gpu, product, ends)

    def joined(self, product: Product, peers: dict[int, tuple[int, ...]], *, links: int) -> None:
        """GPUs joined directly: gpu -> peers, with so many links to each."""
        for gpu, others in peers.items():
            ends = [(REMOTE_GPU, self.gpus[peer]["bus_id"]) for peer in others]
            self.nvlinks(gpu, product, [end for end in ends for _ in range(links)])

    def adapter(self, adapter: Adapter) -> None:
        """One RDMA adapter with one port, and the interface on top of it."""
        folder = f"/sys/class/infiniband/{adapter.name}"
        real = f"/sys/devices/{adapter.chain}"
        port = f"{folder}/ports/1"
        kind = "0x020700" if adapter.link_layer == "InfiniBand" else "0x020000"
        self.pci(
            adapter.chain,
            kind=kind,
            vendor=adapter.vendor,
            device=adapter.device,
            numa=adapter.numa,
            generation=adapter.generation,
            width=adapter.width,
        )
        self.links[f"{folder}/device"] = real
        self.links[f"{folder}/device/driver"] = f"/sys/bus/pci/drivers/{adapter.driver}"
        net = adapter.interface
        speed = f"{GIGATRANSFERS[adapter.generation]} GT/s PCIe\n"
        self.files |= {
            f"{folder}/device/numa_node": f"{adapter.numa}\n",
            f"{folder}/device/current_link_speed": speed,
            f"{folder}/device/current_link_width": f"{adapter.width}\n",
            f"{folder}/device/max_link_speed": speed,
            f"{folder}/device/max_link_width": f"{adapter.width}\n",
            f"{port}/rate": f"{adapter.rate}\n",
            f"{port}/state": f"{adapter.state}\n",
            f"{port}/phys_state": "5: LinkUp\n" if "ACTIVE" in adapter.state else "3: Disabled\n",
            f"{port}/link_layer": f"{adapter.link_layer}\n",
        }
        if adapter.firmware:
            self.files[f"{folder}/fw_ver"] = f"{adapter.firmware}\n"
        for entry, (gid_kind, gid) in enumerate(adapter.gids):
            self.files[f"{port}/gids/{entry}"] = f"{gid}\n"
            self.files[f"{port}/gid_attrs/types/{entry}"] = f"{gid_kind}\n"
            if net is not None and adapter.link_layer == "Ethernet":
                self.files[f"{port}/gid_attrs/ndevs/{entry}"] = f"{net}\n"
        if net is not None:
            self.links[f"{folder}/device/net/{net}"] = f"{real}/net/{net}"

    def interface(
        self,
        name: str,
        *,
        chain: str | None = None,
        driver: str | None = None,
        megabits: int | None = None,
        numa: int = 0,
        state: str = "up",
        networks: tuple[tuple[str, str], ...] = (),
        default: bool = False,
    ) -> None:
        """One network interface; `networks` as (10.1.0.0, 255.255.0.0); no chain: a virtual one."""
        folder = f"/sys/class/net/{name}"
        parent = f"/sys/devices/{chain}" if chain else "/sys/devices/virtual"
        self.links[folder] = f"{parent}/net/{name}"
        if chain is not None:
            self.links[f"{folder}/device"] = parent
            self.links[f"{folder}/device/driver"] = f"/sys/bus/pci/drivers/{driver}"
            self.files[f"{folder}/device/numa_node"] = f"{numa}\n"
            self.files[f"{folder}/dev_port"] = "0\n"
        self.files[f"{folder}/operstate"] = f"{state}\n"
        if megabits is not None:
            self.files[f"{folder}/speed"] = f"{megabits}\n"
        if default:
            self.routes.append((name, "00000000", "00000000"))
        for network, mask in networks:
            self.routes.append((name, word(network), word(mask)))

    def document(self) -> dict[str, Any]:
        """The recording, as `fsdpplan detect --record` writes it."""
        if self.routes:
            self.files["/proc/net/route"] = route_table(self.routes)
        nvml = {"driver": self.driver, "cuda": self.cuda, "gpus": self.gpus, "pairs": self._pairs()}
        return {
            "schema_version": 1,
            "about": self.about,
            "date": "2026-11-22",
            "files": self.files,
            "links": self.links,
            "commands": self.commands,
            "failed": self.failed,
            "environment": self.environment,
            "packages": self.packages,
            "nvml": nvml if self.gpus and self.nvml_error is None else None,
            "nvml_error": self.nvml_error,
        }

    def _pairs(self) -> list[dict[str, int]]:
        """Of any two GPUs: whether they may read each other, and their common ancestor."""
        return [
            {
                "first": first,
                "second": second,
                "p2p": self.p2p,
                "ancestor": ancestor(
                    self.chains[first],
                    self.chains[second],
                    same_numa=self.gpus[first]["numa_node"] == self.gpus[second]["numa_node"],
                ),
            }
            for first, second in combinations(range(len(self.gpus)), 2)
        ]


def ancestor(one: str, other: str, *, same_numa: bool) -> int:
    """NVML's number for the nearest common ancestor of two chains (nvmlGpuTopologyLevel_t)."""
    ways = one.split("/"), other.split("/")
    shared = sum(1 for _ in _common(*ways))
    if shared == 0:
        return 40 if same_numa else 50
    if shared == 1:
        return 30
    return 10 if max(map(len, ways)) - shared <= 2 else 20


def _common(one: list[str], other: list[str]) -> list[str]:
    """The parts from the host bridge down that two ways share."""
    shared = []
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared.append(a)
    return shared


def words(cores: str) -> list[int]:
    """Cores such as `0-55,112-167` as NVML's words of 64 bits."""
    numbers: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    mask = sum(1 << number for number in numbers)
    return [(mask >> shift) & (2**64 - 1) for shift in range(0, max(numbers) + 1, 64)]


def word(address: str) -> str:
    """`10.1.0.0` as the kernel's routing table writes it on a little-endian machine."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))


def route_table(routes: list[tuple[str, str, str]]) -> str:
    """/proc/net/route with its gateways taken out."""
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    rows = (
        f"{name}\t{destination}\tx\t{'0003' if mask == '00000000' else '0001'}\t0\t0\t0\t{mask}"
        "\t0\t0\t0\n"
        for name, destination, mask in routes
    )
    return head + "".join(rows)
