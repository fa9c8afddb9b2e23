"""Software: versions of driver, CUDA, torch and NCCL, and the network plugins installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from fsdpplan.spec.machine import Software
from fsdpplan.topology.conclude.gpus import nvidia_facts
from fsdpplan.topology.read.places import ENV_PROFILES, NET_PLUGINS
from fsdpplan.topology.read.reading import first_line
from fsdpplan.topology.read.recording import Recording

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
