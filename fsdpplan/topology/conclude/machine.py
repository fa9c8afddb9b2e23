"""Machine of a recording: all parsers put together.

Software: versions of driver, CUDA, torch and NCCL, and the network plugins installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from fsdpplan.spec.machine import Machine, Software
from fsdpplan.topology.conclude.gpus import gpus_of, nvidia_facts, pairs_of
from fsdpplan.topology.conclude.nics import nics_of
from fsdpplan.topology.read.host import host_of
from fsdpplan.topology.read.interfaces import interfaces_of
from fsdpplan.topology.read.pci import pci_paths_of
from fsdpplan.topology.read.reading import first_line
from fsdpplan.topology.read.recording import ENV_PROFILES, NET_PLUGINS, Recording
from fsdpplan.topology.read.surroundings import (
    cloud_of,
    kubernetes_of,
    other_accelerators_of,
    slurm_of,
)

_VERSION = re.compile(r"[0-9]+(?:\.[0-9A-Za-z+_-]+)+")


def software_of(recording: Recording) -> Software:
    """What is installed, as far as it says its version."""
    facts = nvidia_facts(recording)
    return Software(
        driver=_driver(recording, facts),
        cuda=_version(facts.get("cuda")),
        torch=_version(recording.packages.get("torch")),
        nccl=_nccl(recording),
        net_plugins=_found(recording, NET_PLUGINS),
        env_profiles=_found(recording, ENV_PROFILES),
    )


def _version(text: object) -> str | None:
    """`text` if it looks like a version."""
    line = first_line(text) if isinstance(text, str) else None
    return line if line is not None and _VERSION.fullmatch(line) else None


def _driver(recording: Recording, facts: Mapping[str, object]) -> str | None:
    """By NVML, else the first line of the driver's file: `NVRM version: NVIDIA UNIX
    x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023`."""
    found = _version(facts.get("driver"))
    if found is not None:
        return found
    text = first_line(recording.text("/proc/driver/nvidia/version")) or ""
    match = re.search(r"Kernel Module.*? ([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})\b", text)
    return match[1] if match else None


def _nccl(recording: Recording) -> str | None:
    """The wheel of NCCL that belongs to torch's CUDA; None where torch brings its own build, or
    where several wheels leave it open."""
    wheels = {
        name.rpartition("-cu")[2]: version
        for name, text in recording.packages.items()
        if name.startswith("nvidia-nccl-cu") and (version := _version(text)) is not None
    }
    cuda = re.search(r"\+cu([0-9]{2})[0-9]$", recording.packages.get("torch", ""))
    if cuda is not None and cuda[1] in wheels:
        return wheels[cuda[1]]
    return next(iter(wheels.values())) if len(set(wheels.values())) == 1 else None


def _found(recording: Recording, globs: tuple[str, ...]) -> tuple[str, ...]:
    """Recorded paths that one of `globs` names, `*` inside of one folder only."""
    paths = sorted(path for path in {*recording.links, *recording.files} if path.isprintable())
    return tuple(path for path in paths if any(_names(glob, path) for glob in globs))


def _names(glob: str, path: str) -> bool:
    wanted, parts = glob.split("/"), path.split("/")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


_NVIDIA = "0x10de"
_EMPTY_BY_NATURE = re.compile(
    r"/sys/class/infiniband/.*/(gids|gid_attrs)/|/sys/class/net/[^/]+/speed"
)
"""What the kernel refuses to read where there is nothing to say: free entries of a GID table, the
speed of an interface that is down."""


def machine_of(recording: Recording) -> Machine:
    """The host that was recorded. What the recording does not say is None or empty."""
    gpus, nics = gpus_of(recording), nics_of(recording)
    bus_ids = {device.bus_id for device in gpus} | {device.bus_id for device in nics}
    return Machine(
        host=host_of(recording),
        software=software_of(recording),
        gpus=gpus,
        pairs=pairs_of(recording),
        nics=nics,
        interfaces=interfaces_of(recording),
        pci_paths=pci_paths_of(recording, {bus_id for bus_id in bus_ids if bus_id is not None}),
        slurm=slurm_of(recording),
        kubernetes=kubernetes_of(recording),
        cloud=cloud_of(recording),
        other_accelerators=other_accelerators_of(recording),
        unread=_unread(recording),
    )


def _unread(recording: Recording) -> tuple[str, ...]:
    """What is there and could not be read; a command that is not installed is not."""
    failed = (
        f"{what}: {why}"
        for what, why in sorted(recording.failed.items())
        if not re.search("not found|no such file", why, re.IGNORECASE)
        and not _EMPTY_BY_NATURE.match(what)
        # scontrol may be installed on hosts that no Slurm knows of
        and ("SLURM_JOB_ID" in recording.environment or not what.startswith("scontrol "))
    )
    if recording.nvml_error is not None and _has_nvidia(recording):
        return (f"NVML: {recording.nvml_error}", *failed)
    return tuple(failed)


def _has_nvidia(recording: Recording) -> bool:
    """An NVIDIA device or driver is here, so that NVML should answer."""
    folder = "/sys/bus/pci/devices"
    vendors = (recording.text(f"{folder}/{each}/vendor") for each in recording.children(folder))
    return recording.text("/proc/driver/nvidia/version") is not None or _NVIDIA in vendors
