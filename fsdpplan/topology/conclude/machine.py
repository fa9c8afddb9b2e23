"""Machine of a recording: all parsers put together."""

from __future__ import annotations

import re

from fsdpplan.spec.machine import Machine
from fsdpplan.topology.conclude.gpus import gpus_of, pairs_of
from fsdpplan.topology.conclude.nics import nics_of
from fsdpplan.topology.conclude.software import software_of
from fsdpplan.topology.read.host import host_of
from fsdpplan.topology.read.interfaces import interfaces_of
from fsdpplan.topology.read.pci import pci_paths_of
from fsdpplan.topology.read.recording import Recording
from fsdpplan.topology.read.surroundings import (
    cloud_of,
    kubernetes_of,
    other_accelerators_of,
    slurm_of,
)

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
