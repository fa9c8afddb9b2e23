"""Places: what is read of a host, and what of it a recording keeps.

Globs are those of `glob.glob` without `**`. A recording keeps no address of a host: `kept_text`
takes out what the parsers do not need before anything is written down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_NIC = "/sys/class/infiniband/*"
_PORT = f"{_NIC}/ports/*"
_GIDS = ("[0-9]", "1[0-5]")
"""The first 16 entries of a GID table: a port has a handful, and room for 256."""
_PCI_LINK: tuple[str, ...] = (
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
)

NET_PLUGINS = (
    "/opt/amazon/ofi-nccl/lib*/libnccl-net*.so",
    "/opt/amazon/ofi-nccl/lib*/*-linux-gnu/libnccl-net*.so",
    "/opt/amazon/aws-ofi-nccl/lib*/libnccl-net*.so",
    "/opt/aws-ofi-nccl/lib*/libnccl-net*.so",
    "/opt/aws-ofi-nccl/install/lib*/libnccl-net*.so",
    "/usr/local/gib/lib64/libnccl-net*.so",
    "/var/lib/tcpxo/lib64/libnccl-net*.so",
    "/usr/local/fastrak/lib64/libnccl-net*.so",
    "/var/lib/tcpx/lib64/libnccl-net*.so",
    "/usr/local/tcpx/lib64/libnccl-net*.so",
    "/usr/local/nvidia/lib64/libnccl-net*.so",
    "/opt/hpcx*/nccl_*_plugin/lib/libnccl-net*.so",
)
"""NCCL network plugins where their providers put them: AWS's EFA installer, its Deep Learning AMIs
and NVIDIA's containers; Google's gIB, TCPXO (FasTrak) and TCPX, on a VM and in a GKE pod; HPC-X."""

ENV_PROFILES = (
    "/usr/local/gib/scripts/set_nccl_env.sh",
    "/var/lib/tcpxo/lib64/nccl-env-profile.sh",
    "/usr/local/nvidia/lib64/nccl-env-profile.sh",
)
"""Scripts of a cloud that set NCCL's variables: Google's gIB; TCPXO on a VM and in a GKE pod."""

FILES: tuple[str, ...] = (
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/osrelease",
    "/proc/cmdline",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/net/route",
    "/proc/self/limits",
    "/proc/1/cgroup",
    "/proc/driver/nvidia/version",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/node/has_cpu",
    "/sys/module/nvidia_peermem/version",
    "/sys/module/nv_peer_mem/version",
    "/sys/module/efa_nv_peermem/version",
    "/sys/kernel/mm/memory_peers/nv_mem/version",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/class/dmi/id/product_name",
    "/sys/class/dmi/id/chassis_asset_tag",
    "/sys/class/kfd/kfd/topology/nodes/*/properties",
    "/sys/class/net/*/operstate",
    "/sys/class/net/*/speed",
    "/sys/class/net/*/dev_port",
    "/sys/class/net/*/device/numa_node",
    f"{_NIC}/fw_ver",
    f"{_NIC}/device/numa_node",
    f"{_NIC}/device/sriov_totalvfs",
    *(f"{_NIC}/device/{name}" for name in _PCI_LINK),
    *(f"{_PORT}/{name}" for name in ("rate", "state", "phys_state", "link_layer")),
    *(f"{_PORT}/gids/{entry}" for entry in _GIDS),
    *(f"{_PORT}/gid_attrs/types/{entry}" for entry in _GIDS),
    *(f"{_PORT}/gid_attrs/ndevs/{entry}" for entry in _GIDS),
)
"""Globs of files that are read as text."""

LINKS = (
    "/sys/class/net/*",
    "/sys/class/net/*/device",
    "/sys/class/net/*/device/driver",
    "/sys/class/infiniband/*/device",
    "/sys/class/infiniband/*/device/driver",
    "/sys/class/infiniband/*/device/physfn",
    "/sys/class/infiniband/*/device/net/*",
    "/sys/class/iommu/*",
    *NET_PLUGINS,
    *ENV_PROFILES,
)
"""Globs of paths whose real path is recorded; of some only that they are there is of use."""

PCI_CLASSES = ("0x02", "0x03", "0x0b40", "0x12")
"""PCI devices of these classes are recorded (their `class` file starts so): network, display,
coprocessors, accelerators. Of each: the link `/sys/bus/pci/devices/<address>` and `PCI_FILES`."""
PCI_FILES = ("class", "vendor", "device", "numa_node", "iommu_group/type", *_PCI_LINK)
"""Files under `/sys/bus/pci/devices/<address>/` of a recorded device."""

COMMANDS = (
    ("lscpu",),
    ("df", "-B1", "--output=size", "/dev/shm"),
    ("lspci", "-D", "-vvv", "-d", "::0604"),
    ("ip", "-json", "-6", "route", "show", "table", "main"),
    ("scontrol", "version"),
)
"""Commands whose output is read, under LC_ALL=C."""

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "KUBERNETES_SERVICE_PORT",
    "SLURMD_NODENAME",
    "SLURM_GPUS_ON_NODE",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_PARTITION",
)
"""Variables that are read; nothing else of the environment is."""

PACKAGES = ("torch", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-ml-py")
"""Installed distributions whose version is read."""

_KEPT_LINES = {
    "/proc/cpuinfo": "model name",
    "/proc/meminfo": "MemTotal|Huge",
    "/proc/self/limits": "Max locked memory",
    "/proc/1/cgroup": ".*kubepods",
    "lscpu": r"Architecture|CPU\(s\)|Model name|Socket\(s\)|NUMA node\(s\)",
}
"""Source -> how the lines begin that are of use; of equal lines one."""
_NODE_FIELDS = "Gres|Partitions"
_KERNEL_WORDS = ("iommu", "intel_iommu", "amd_iommu", "pci", "pcie_acs_override")


def commands_for(*, hostname: str, environment: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """`COMMANDS`, and what Slurm is asked of this node by its name."""
    node = environment.get("SLURMD_NODENAME") or hostname.partition(".")[0]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", node):
        return COMMANDS
    return (*COMMANDS, ("scontrol", "show", "node", node))


def kept_text(source: str, text: str) -> str:
    """What a recording keeps of the `text` of `source`, a path or a command line: what the parsers
    need, and no address.

    To be applied before any limit of size: the bridges of a large host fill a megabyte.
    """
    if "/gids/" in source:
        return gid_form(text)
    if source == "/proc/net/route":
        return _lines(map(_route_without_gateway, text.splitlines()))
    if source in _KEPT_LINES:
        kept = [line for line in text.splitlines() if re.match(_KEPT_LINES[source], line)]
        return _lines(dict.fromkeys(kept))
    if source == "/proc/cmdline":
        words = (word for word in text.split() if word.partition("=")[0] in _KERNEL_WORDS)
        return " ".join(words) + "\n"
    if source.startswith("lspci "):
        return _lines(line for line in text.splitlines() if _says_access_control(line))
    if source.startswith("ip "):
        return _without_ipv6_addresses(text)
    if source.startswith("scontrol show node"):
        return _lines(re.findall(rf"\b(?:{_NODE_FIELDS})=\S+", text))
    return text


def gid_form(text: str) -> str:
    """The kind of a GID without the address in it: `::ffff:x.x.x.x` (IPv4), `fe80::x` (link-local,
    made of a MAC or GUID), `x::x` (any other), `::` (empty); other text is left as it is."""
    groups = text.strip().lower().split(":")
    if len(groups) != 8 or not all(re.fullmatch(r"[0-9a-f]{4}", group) for group in groups):
        return text.strip()
    if set(groups) == {"0000"} or (groups[0] == "fe80" and set(groups[1:]) == {"0000"}):
        return "::"
    if set(groups[:5]) == {"0000"} and groups[5] == "ffff":
        return "::ffff:x.x.x.x"
    return "fe80::x" if groups[0] == "fe80" else "x::x"


def _lines(lines: Iterable[str | None]) -> str:
    return "".join(f"{line}\n" for line in lines if line is not None)


def _route_without_gateway(line: str) -> str | None:
    """A row of /proc/net/route with its third column, the gateway, taken out; None for the route to
    a single host."""
    columns = line.split("\t")
    if len(columns) > 7 and columns[2].strip() != "Gateway":
        columns[2] = "x"
        if columns[7] == "FFFFFFFF":
            return None
    return "\t".join(columns)


def _without_ipv6_addresses(text: str) -> str:
    """The answer of `ip -json route` with gateways, own addresses, and destinations that are single
    hosts taken out: by DHCPv6 an own address is one."""
    masked = re.sub(r'"(gateway|prefsrc|host)": *"[^"]*"', r'"\1":"x"', text)
    return re.sub(r'"dst": *"[^"/]*:[^"/]*"', '"dst":"x"', masked)


def _says_access_control(line: str) -> bool:
    """The line names a bridge, or says what its access control is or that it may not be read."""
    return line[:1].isalnum() or "ACSCtl:" in line or "access denied" in line
