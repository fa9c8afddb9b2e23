"""Lists and pages of hardware profiles, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypedDict, get_args

from fsdpplan.cli.views.render import blocks, facts, flat_pairs, table, wrapped
from fsdpplan.cost.kernels.rates import Achieved, achieved_rates
from fsdpplan.errors import SpecError, did_you_mean
from fsdpplan.files.profiles.catalogue import Profile, ProfileKind
from fsdpplan.files.profiles.devices import DeviceProfile, PhysicsProfile
from fsdpplan.files.profiles.levels import LevelProfile
from fsdpplan.files.profiles.nodes import ClusterProfile, NodeProfile
from fsdpplan.files.profiles.search import Entry, kind_of
from fsdpplan.files.table import short
from fsdpplan.spec.cluster import Device, Level, StepError
from fsdpplan.units import format_bandwidth, format_gib, format_percent

LEAST_VALUE = 24
"""Columns that values need beside their names."""


def profile_kind(text: str | None) -> ProfileKind | None:
    """What --kind says."""
    kinds: tuple[ProfileKind, ...] = get_args(ProfileKind)
    if text is None or text in kinds:
        return next((kind for kind in kinds if kind == text), None)
    raise SpecError(
        f"--kind: {short(text)} is not known{did_you_mean(text, kinds)}; type "
        f"{', '.join(kinds[:-1])} or physics"
    )


def profiles_table(entries: Sequence[Entry], *, width: int) -> str:
    """What --hardware takes, the devices that --gpu takes, and what all CUDA devices share."""
    machines = [
        (entry.name, *_machine_words(entry.profile))
        for entry in entries
        if isinstance(entry.profile, NodeProfile | ClusterProfile)
    ]
    devices = [
        (entry.name, *_device_words(entry.profile.device))
        for entry in entries
        if isinstance(entry.profile, DeviceProfile)
    ]
    shared = [entry.name for entry in entries if isinstance(entry.profile, PhysicsProfile)]
    machine_table = _section(
        "For --hardware, in GB/s one way: inside, what one GPU has (to 72: into 72 GPUs, more or "
        "fewer than the node's); adapters, how many one node has to the outside x what each has",
        machines,
        headers=("name", "GPUs", "device", "inside", "adapters"),
        align=("left", "right", "left", "right", "right"),
        width=width,
    )
    device_table = _section(
        "For --gpu: dense bf16 peak, and the share of it that large matmuls reach",
        devices,
        headers=("name", "memory", "bandwidth", "TFLOP/s", "reached", "evidence"),
        align=("left", "right", "right", "right", "right", "left"),
        width=width,
    )
    physics = ["Shared by all CUDA devices", *(f"  {name}" for name in shared)]
    return blocks(machine_table, device_table, "\n".join(physics if shared else []))


def _section(
    heading: str,
    rows: Sequence[Sequence[str]],
    *,
    headers: Sequence[str],
    align: Sequence[str],
    width: int,
) -> str:
    if not rows:
        return ""
    text = table(rows, align=align, headers=headers, width=width)
    return f"{wrapped(heading, width=width)}\n{text}"


def _device_words(device: Device) -> tuple[str, ...]:
    return (
        format_gib(device.memory_bytes),
        format_bandwidth(device.memory_bandwidth_bytes_per_second),
        f"{device.peak_bf16_flops_per_second / 1e12:,.4g}",
        format_percent(device.fit.matmul_fraction),
        device.evidence,
    )


def _machine_words(profile: NodeProfile | ClusterProfile) -> tuple[str, str, str, str]:
    match profile:
        case NodeProfile():
            size = "any" if profile.gpus_per_node is None else str(profile.gpus_per_node)
            first, last = profile.levels[0], profile.levels[-1]
            outside = _outside(profile, last) if last.joins == "cluster" else "none"
            return (size, profile.device, _inside(first), outside)
        case ClusterProfile():
            types = ", ".join(kind.node for kind in profile.node_types)
            return ("" if profile.gpus is None else str(profile.gpus), types, "", "")


def _inside(level: LevelProfile) -> str:
    """`450`: what one GPU has; `900 to 72` where that leads to other GPUs than the node's."""
    joined = "" if level.domain_gpus is None else f" to {level.domain_gpus}"
    gigabytes = f"{level.level.port_bandwidth_bytes_per_second / 1e9:g}"
    ports = level.level.ports
    return f"{gigabytes if ports == 1 else f'{ports:g} x {gigabytes}'}{joined}"


def _outside(node: NodeProfile, level: LevelProfile) -> str:
    """`8 x 50`, `1 x 25`: adapters of one node, which may share them with others of a domain."""
    below = [inner.domain_gpus for inner in node.levels if inner.joins == "domain"]
    largest = max((gpus for gpus in below if gpus is not None), default=0)
    nodes = max(1.0, largest / (node.gpus_per_node or 1))
    adapters = level.level.ports / nodes
    return f"{adapters:g} x {level.level.port_bandwidth_bytes_per_second / 1e9:g}"


def profiles_json(entries: Sequence[Entry]) -> str:
    """All of them."""
    return json.dumps({"profiles": [_document(entry) for entry in entries]}, indent=2)


def profile_json(entry: Entry) -> str:
    """One profile with its sources."""
    return json.dumps(_document(entry), indent=2)


class OpenPortsJson(TypedDict):
    """Beside the fields of a level: null where they follow from those of the level below."""

    ports: int | None
    port_bandwidth_bytes_per_second: float | None


class LevelJson(TypedDict):
    """Beside the fields of a profile's level."""

    level: Annotated[dict[str, Any], Level, OpenPortsJson]


class ProfileJson(TypedDict):
    """Beside the fields of a profile."""

    kind: ProfileKind
    name: str
    sources: dict[str, str]
    """Where each number comes from."""


class DeviceJson(ProfileJson):
    """Beside the fields of a device's profile."""

    achieved: list[Annotated[dict[str, Any], Achieved]]


class PhysicsJson(ProfileJson):
    """Beside the fields of what all devices share."""

    fit: dict[str, float]
    errors: dict[str, Annotated[dict[str, Any], StepError]]


class LinksJson(ProfileJson):
    """Beside the fields of a node's or a cluster's profile."""

    levels: list[Annotated[dict[str, Any], LevelProfile, LevelJson]]
    """Innermost first."""


class DescribedJson(TypedDict):
    """Beside the fields of a profile that is listed."""

    description: str


def profile_document(profile: Profile) -> dict[str, Any]:
    """A profile as JSON has it, with what a device achieves and the source of each number."""
    name = profile.device.name if isinstance(profile, DeviceProfile) else profile.name
    document = {"kind": kind_of(profile), "name": name, **asdict(profile)}
    match profile:
        case PhysicsProfile():
            document["fit"] = dict(profile.fit)
            document["errors"] = dict(document["errors"])
        case DeviceProfile():
            document["achieved"] = [asdict(rate) for rate in achieved_rates(profile.device)]
        case NodeProfile() | ClusterProfile():
            document["levels"] = [_level_document(level) for level in profile.levels]
    return {**document, "sources": dict(profile.sources)}


def _level_document(level: LevelProfile) -> dict[str, Any]:
    """A level; its ports are open where they follow from those of the level below."""
    document = asdict(level)
    if level.oversubscription is not None:
        document["level"] |= {"ports": None, "port_bandwidth_bytes_per_second": None}
    return document


def _document(entry: Entry) -> dict[str, Any]:
    return {"description": entry.description, **profile_document(entry.profile)}


def profile_page(entry: Entry, *, width: int) -> str:
    """Every number of a profile, what it achieves, and where each number comes from."""
    profile = entry.profile
    achieved = (
        _achieved(achieved_rates(profile.device), width)
        if isinstance(profile, DeviceProfile)
        else ""
    )
    grouped: dict[str, list[str]] = {}
    for field, source in profile.sources:
        grouped.setdefault(source, []).append(field.removeprefix("cluster."))
    sources = [line for source, names in grouped.items() for line in _source(names, source, width)]
    return blocks(
        wrapped(f"{entry.name}: {entry.description}", width=width),
        _values(profile_document(profile), width),
        achieved,
        "\n".join(["Sources", *sources]),
    )


def _values(document: Mapping[str, Any], width: int) -> str:
    """`name  value` of all fields, or `name: value` where the screen is narrow."""
    left_out = ("kind", "name", "achieved", "sources", "levels")
    shown = {key: value for key, value in document.items() if key not in left_out}
    for level in document.get("levels", ()):
        inner = {key: value for key, value in level.items() if key != "level"}
        shown[f"levels.{level['level']['name']}"] = {**level["level"], **inner}
    pairs = [pair for key, value in shown.items() for pair in flat_pairs(key, value)]
    kept = [("kind", document["kind"]), *(pair for pair in pairs if not _is_open(*pair))]
    if max(len(name) for name, _ in kept) + LEAST_VALUE <= width:
        return facts(kept, width=width)
    return "\n".join(wrapped(f"{name}: {text}", width=width, first="  - ") for name, text in kept)


def _is_open(key: str, text: str) -> bool:
    """A field that is said already (as sources are, below), that a profile does not have, or that
    follows from others."""
    repeated = key.startswith("levels.") and key.endswith(".name")
    follows = key.endswith(".num_nodes") and text == "0"
    absent = text in ("none", "") and not key.startswith(("device.", "nvml_names"))
    unsaid = key.startswith("network.") and (text == "False" or key == "network.evidence")
    return repeated or follows or absent or unsaid


def _achieved(rates: Sequence[Achieved], width: int) -> str:
    rows = [
        (rate.what, *(_rate(rate, value) for value in (rate.peak, rate.alone, rate.in_step)))
        for rate in rates
    ]
    headers = ("large kernels", "peak", "achieved", "in a step")
    return _section(
        "Achieved beside peak: the peak times its fractions",
        rows,
        headers=headers,
        align=("left", "right", "right", "right"),
        width=width,
    )


def _rate(rate: Achieved, value: float) -> str:
    if rate.unit == "bytes_per_second":
        return format_bandwidth(value)
    return f"{value / 1e12:,.4g} TFLOP/s"


def _source(names: list[str], source: str, width: int) -> list[str]:
    """The fields, then each part of their source in lines of its own, so that links stay whole."""
    return [
        wrapped(", ".join(names), width=width, first="  - "),
        *(wrapped(part, width=width, first="      ") for part in source.split("; ")),
    ]
