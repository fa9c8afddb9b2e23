"""Recording: all that `detect` reads of one host, as data, so that every parser is pure.

On disk it is one JSON object with the fields of `Recording` and `schema_version`. It may come from
another machine, by mail or from an issue, so it is read with distrust.

Globs of what is read are those of `glob.glob` without `**`. A recording keeps no address of a host:
`kept_text` takes out what the parsers do not need before anything is written down.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from fsdpplan.errors import SpecError

SCHEMA_VERSION = 1
MAX_RECORDING_CHARACTERS = 32 * 2**20
"""A host with 8 GPUs and 10 adapters fills less than one MiB."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_TEXT_MAPS = ("files", "links", "commands", "failed", "environment", "packages")
_PATH_MAPS = ("files", "links")
_DOCUMENT_KEYS = frozenset({"schema_version", "about", "date", *_TEXT_MAPS, "nvml", "nvml_error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was read of one host. What is not in it was not there, or could not be read."""

    about: str = ""
    """What it is, or what it is built from."""
    date: str = ""
    """Day of the reading, `2026-05-31`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path -> text."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Absolute path -> real path."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Command line -> what it printed; only those that succeeded."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Command line or path -> why it could not be read."""
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed distribution -> version."""
    nvml: Mapping[str, object] | None = None
    """What NVML said, as `topology.nvml` writes it; None where there is no NVML."""
    nvml_error: str | None = None
    """What NVML failed at; None where all went well, and where there is no driver at all."""

    def text(self, path: str) -> str | None:
        """Text of the file, without white space around it."""
        text = self.files.get(path)
        return None if text is None else text.strip()

    def link(self, path: str) -> str | None:
        """Where the path leads to."""
        return self.links.get(path)

    def command(self, line: str) -> str | None:
        """What the command printed."""
        return self.commands.get(line)

    def children(self, folder: str) -> tuple[str, ...]:
        """Names directly under the folder that a file or link stands under, sorted."""
        start = folder.rstrip("/") + "/"
        paths = (path for known in (self.files, self.links) for path in known)
        below = (path[len(start) :].partition("/")[0] for path in paths if path.startswith(start))
        return tuple(sorted({name for name in below if name}))


def recording_json(recording: Recording) -> str:
    """The recording as text: stable order, one entry a line."""
    values = {"schema_version": SCHEMA_VERSION} | {
        each.name: _plain(getattr(recording, each.name)) for each in fields(recording)
    }
    return json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n"


def recording_from_json(text: str) -> Recording:
    """The recording in `text`. Raises SpecError where it is none."""
    if len(text) > MAX_RECORDING_CHARACTERS:
        raise SpecError(
            f"a recording of a host is at most {MAX_RECORDING_CHARACTERS} characters long, this "
            f"one is {len(text)}: record again with fsdpplan detect --record FILE"
        )
    values = _object(text)
    _check_keys(values)
    nvml = values.get("nvml")
    if nvml is not None and not isinstance(nvml, dict):
        raise _wrong("nvml", "must be an object or null")
    maps = {name: _texts(values, name) for name in _TEXT_MAPS}
    return Recording(
        about=_text(values, "about"),
        date=_text(values, "date"),
        **maps,
        nvml=nvml,
        nvml_error=_text(values, "nvml_error") if values.get("nvml_error") is not None else None,
    )


def _plain(value: object) -> object:
    """A mapping of any kind as a dict, which JSON can be made of."""
    return dict(value) if isinstance(value, Mapping) else value


def _object(text: str) -> dict[str, Json]:
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _wrong("it", f"is not JSON, as if it was cut ({error})") from error
    if not isinstance(values, dict):
        raise _wrong("it", "must be a JSON object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_keys(values: Mapping[str, Json]) -> None:
    unknown = sorted(values.keys() - _DOCUMENT_KEYS)
    if unknown:
        raise _wrong(unknown[0], "is not known")
    version = values.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise _wrong("schema_version", f"must be {SCHEMA_VERSION}")


def _text(values: Mapping[str, Json], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise _wrong(name, "must be text")
    return value


def _texts(values: Mapping[str, Json], name: str) -> dict[str, str]:
    found = values.get(name)
    if not isinstance(found, dict):
        raise _wrong(name, "must be an object of texts")
    for key, value in found.items():
        if not isinstance(value, str):
            raise _wrong(name, f"must be an object of texts, and {key[:80]!r} is none")
        if name in _PATH_MAPS and not key.startswith("/"):
            raise _wrong(name, f"must have absolute paths, and {key[:80]!r} is none")
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _wrong(name: str, what: str) -> SpecError:
    return SpecError(
        f"the recording of a host is wrong: {name[:80]} {what}; record again with "
        "fsdpplan detect --record FILE"
    )


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
