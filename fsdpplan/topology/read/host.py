"""Host: CPU, memory and limits, and what decides whether adapters may read device memory."""

from __future__ import annotations

import re

from fsdpplan.spec.machine import UNLIMITED_BYTES, Bridge, Host
from fsdpplan.spec.nodes import GpuDirect
from fsdpplan.topology.read.reading import first_line, labelled, numbers_in_list, whole_number
from fsdpplan.topology.read.recording import Recording

_DMABUF_KERNEL = (5, 12)
_PEER_MEMORY = (
    "/sys/module/nvidia_peermem",
    "/sys/module/nv_peer_mem",
    "/sys/module/efa_nv_peermem",
    "/sys/kernel/mm/memory_peers/nv_mem",
)
"""The module of today's driver, its forerunner, AWS's, and what the forerunner registers."""


def host_of(recording: Recording) -> Host:
    """CPU, memory and limits of the recorded host."""
    lscpu = recording.command("lscpu")
    meminfo = recording.text("/proc/meminfo")
    # nodes without cores are memory of GPUs or of CXL
    nodes = numbers_in_list(recording.text("/sys/devices/system/node/has_cpu"))
    cores = numbers_in_list(recording.text("/sys/devices/system/cpu/online"))
    return Host(
        name=_name(recording),
        kernel=first_line(recording.text("/proc/sys/kernel/osrelease")),
        cpu=_cpu(recording),
        sockets=whole_number(labelled(lscpu, "Socket(s)")) or None,
        cores=len(cores) if cores else whole_number(labelled(lscpu, "CPU(s)")) or None,
        numa_nodes=len(nodes) if nodes else None,
        memory_bytes=_kib_bytes(labelled(meminfo, "MemTotal")) or None,
        locked_memory_bytes=_locked_memory_bytes(recording.text("/proc/self/limits")),
        shared_memory_bytes=_shared_memory_bytes(recording),
        hugepage_bytes=_hugepage_bytes(meminfo),
        gpudirect=_gpudirect(recording),
        acs_bridges=_acs_bridges(recording),
        iommu=_iommu(recording),
    )


def _name(recording: Recording) -> str:
    """What the host is called, if that is a name: it stands in commands that a user may copy."""
    name = recording.text("/proc/sys/kernel/hostname") or ""
    return name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}", name) else "localhost"


def _cpu(recording: Recording) -> str | None:
    """Model name; ARM's /proc/cpuinfo has none, lscpu knows the number's name."""
    named = labelled(recording.command("lscpu"), "Model name") or labelled(
        recording.text("/proc/cpuinfo"), "model name"
    )
    return first_line(named)


def _kib_bytes(text: str | None) -> int | None:
    """Bytes in a value of /proc/meminfo, `2113419008 kB`, where kB means 1024 bytes."""
    number = whole_number((text or "").removesuffix("kB"))
    return None if number is None or not (text or "").endswith("kB") else number * 1024


def _locked_memory_bytes(limits: str | None) -> int | None:
    """The soft limit: first of the two in its row of /proc/self/limits."""
    match = re.search(
        r"^Max locked memory +(unlimited|[0-9]{1,20}) +\S+ +bytes", limits or "", re.MULTILINE
    )
    if match is None:
        return None
    return UNLIMITED_BYTES if match[1] == "unlimited" else min(int(match[1]), UNLIMITED_BYTES)


def _shared_memory_bytes(recording: Recording) -> int | None:
    """`df -B1 --output=size /dev/shm` prints a heading and the size."""
    lines = (recording.command("df -B1 --output=size /dev/shm") or "").split()
    return whole_number(lines[1]) if len(lines) == 2 else None


def _hugepage_bytes(meminfo: str | None) -> int | None:
    """`Hugetlb` counts pages of all sizes; older kernels only say the number of the usual ones."""
    everything = _kib_bytes(labelled(meminfo, "Hugetlb"))
    if everything is not None:
        return everything
    pages = whole_number(labelled(meminfo, "HugePages_Total"))
    page_bytes = _kib_bytes(labelled(meminfo, "Hugepagesize"))
    return None if pages is None or page_bytes is None else pages * page_bytes


def _gpudirect(recording: Recording) -> GpuDirect | None:
    """How adapters may read device memory, by the modules that are loaded.

    DMA-BUF needs the open kernel module and Linux 5.12 (NVIDIA GPU Operator, "GPUDirect RDMA and
    GPUDirect Storage"). NCCL looks for the peer-memory modules at the same places (2.30.7
    src/transport/net_ib/gdr.cc, ibGdrSupportInitOnce), UCX also for AWS's (openucx/ucx pull request
    10704). EFA's own driver may do it without any (amzn-drivers issue 282), so that it is unknown
    there.
    """
    if any(recording.children(folder) for folder in _PEER_MEMORY):
        return "peermem"
    driver = recording.text("/proc/driver/nvidia/version")
    kernel = re.match(
        r"([0-9]{1,3})\.([0-9]{1,3})", recording.text("/proc/sys/kernel/osrelease") or ""
    )
    if driver is None or "NVRM version:" not in driver:
        return None
    without: GpuDirect | None = None if _has_efa(recording) else "none"
    if "Open Kernel Module" not in driver:
        return without
    if kernel is None:
        return None
    return "dmabuf" if (int(kernel[1]), int(kernel[2])) >= _DMABUF_KERNEL else without


def _has_efa(recording: Recording) -> bool:
    folder = "/sys/class/infiniband"
    drivers = (recording.link(f"{folder}/{n}/device/driver") for n in recording.children(folder))
    return any((driver or "").endswith("/efa") for driver in drivers)


def _acs_bridges(recording: Recording) -> tuple[Bridge, ...] | None:
    """Bridges with `SrcValid+` in their access control, which NVIDIA takes as the sign (NCCL user
    guide, troubleshooting, "PCI Access Control Services"). Only root may read it."""
    texts = [text for line, text in recording.commands.items() if re.match(r"lspci .*-vv", line)]
    bridges: list[Bridge] = []
    complete = any("bridge" in text for text in texts) and "access denied" not in "".join(texts)
    here = None
    for line in (line for text in texts for line in text.splitlines()):
        heading = re.match(r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.*)", line)
        if heading is not None:
            here = heading[1] if "bridge" in heading[2] else None
        elif here is not None and "ACSCtl:" in line and "SrcValid+" in line:
            bridges.append(Bridge(bus_id=here if here.count(":") == 2 else f"0000:{here}"))
    return tuple(bridges) if bridges or complete else None


def _iommu(recording: Recording) -> bool | None:
    """Whether the kernel translates: by the groups of the recorded devices (`DMA`, `DMA-FQ` or
    `identity`), else by its command line, else by there being a unit at all.

    Source: Linux, Documentation/ABI/testing/sysfs-kernel-iommu_groups.
    """
    folder = "/sys/bus/pci/devices"
    kinds = {
        recording.text(f"{folder}/{device}/iommu_group/type")
        for device in recording.children(folder)
    } - {None}
    if kinds & {"DMA", "DMA-FQ"}:
        return True
    if kinds == {"identity"}:
        return False
    words = set((recording.text("/proc/cmdline") or "").split())
    if words & {"iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off"}:
        return False
    return True if recording.children("/sys/class/iommu") else None
