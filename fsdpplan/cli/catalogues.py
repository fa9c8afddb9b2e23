"""Lists and pages of the two catalogues, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fsdpplan.cli.render import blocks, facts, table, wrapped
from fsdpplan.cost.params import active_parameter_count, parameter_count
from fsdpplan.files.profile_devices import DeviceProfile, PhysicsProfile
from fsdpplan.files.profile_format import Profile
from fsdpplan.files.profile_nodes import ClusterProfile, NodeProfile
from fsdpplan.spec.cluster import Level
from fsdpplan.spec.model import Model
from fsdpplan.units import format_bandwidth, format_count, format_gib


def profile_name(profile: Profile) -> str:
    """Its name."""
    return profile.device.name if isinstance(profile, DeviceProfile) else profile.name


def profile_kind(profile: Profile) -> str:
    """device, node, cluster or physics."""
    match profile:
        case DeviceProfile():
            return "device"
        case NodeProfile():
            return "node"
        case ClusterProfile():
            return "cluster"
        case PhysicsProfile():
            return "physics"


def profiles_table(profiles: Mapping[str, Profile], *, width: int) -> str:
    """What --hardware takes, the devices that --gpu takes, and what all CUDA devices share."""
    nodes = [
        (name, *_machine_words(profile))
        for name, profile in profiles.items()
        if isinstance(profile, NodeProfile | ClusterProfile)
    ]
    devices = [
        (
            name,
            format_gib(profile.device.memory_bytes),
            format_bandwidth(profile.device.memory_bandwidth_bytes_per_second),
            f"{profile.device.peak_bf16_flops_per_second / 1e12:,.4g}",
            profile.device.evidence,
        )
        for name, profile in profiles.items()
        if isinstance(profile, DeviceProfile)
    ]
    node_table = table(
        nodes,
        align=("left", "right", "left", "right", "right"),
        headers=("name", "GPUs", "device", "inside", "outside"),
        width=width,
    )
    device_table = table(
        devices,
        align=("left", "right", "right", "right", "left"),
        headers=("name", "memory", "bandwidth", "TFLOP/s", "evidence"),
        width=width,
    )
    shared = [name for name, profile in profiles.items() if isinstance(profile, PhysicsProfile)]
    for_hardware = "For --hardware: links inside a node per GPU, outside per node, one direction"
    for_gpu = "For --gpu: dense bf16 peak; where the efficiencies come from"
    return blocks(
        f"{wrapped(for_hardware, width=width)}\n{node_table}",
        f"{wrapped(for_gpu, width=width)}\n{device_table}",
        "\n".join(["Shared by all CUDA devices", *(f"  {name}" for name in shared)]),
    )


def _machine_words(profile: Profile) -> tuple[str, str, str, str]:
    match profile:
        case NodeProfile():
            size = "any" if profile.gpus_per_node is None else str(profile.gpus_per_node)
            links = [_ports(level.level) for level in profile.levels]
            return (size, profile.device, links[0], links[1] if len(links) > 1 else "none")
        case ClusterProfile():
            return (f"{profile.gpus} in all", profile.node, "", "")
        case _:
            raise TypeError("only machines have links")


def _ports(level: Level) -> str:
    """`8 x 50.0 GB/s`: the ports by which one GPU, or one node, reaches this level."""
    bandwidth = format_bandwidth(level.port_bandwidth_bytes_per_second)
    return bandwidth if level.ports == 1 else f"{level.ports} x {bandwidth}"


def profiles_json(profiles: Mapping[str, Profile]) -> str:
    """All profiles by name."""
    return _dumps({"profiles": [_profile_document(profile) for profile in profiles.values()]})


def profile_json(profile: Profile) -> str:
    """One profile with its sources."""
    return _dumps(_profile_document(profile))


def _profile_document(profile: Profile) -> dict[str, Any]:
    document = {"kind": profile_kind(profile), "name": profile_name(profile), **asdict(profile)}
    if isinstance(profile, PhysicsProfile):
        document["fit"] = dict(profile.fit)
    return {**document, "sources": dict(profile.sources)}


def profile_page(profile: Profile, *, width: int) -> str:
    """Every number of a profile and, under it, where it comes from."""
    document = {k: v for k, v in _profile_document(profile).items() if k != "sources"}
    values = [pair for key, value in document.items() for pair in _flat(key, value)]
    grouped: dict[str, list[str]] = {}
    for field, source in profile.sources:
        grouped.setdefault(source, []).append(field.removeprefix("cluster."))
    sources = [line for source, names in grouped.items() for line in _source(names, source, width)]
    return blocks(facts(values, width=width), "\n".join(["Sources", *sources]))


def _source(names: list[str], source: str, width: int) -> list[str]:
    """The fields, then each part of their source in lines of its own, so that links stay whole."""
    return [
        wrapped(", ".join(names), width=width, first="  - "),
        *(wrapped(part, width=width, first="      ") for part in source.split("; ")),
    ]


def models_table(models: Sequence[Model], *, width: int) -> str:
    """One line a model."""
    headers = ("name", "parameters", "active", "layers", "hidden", "heads", "kv", "vocab")
    rows = [
        (
            model.name,
            format_count(parameter_count(model)),
            format_count(active_parameter_count(model)) if model.experts else "all",
            str(model.layers),
            str(model.hidden),
            str(model.heads),
            str(model.kv_heads),
            str(model.vocab),
        )
        for model in models
    ]
    return table(rows, headers=headers, align=("left", *["right"] * 7), width=width)


def models_json(models: Sequence[Model]) -> str:
    """All models."""
    return _dumps({"models": [_model_document(model) for model in models]})


def model_json(model: Model, source: str) -> str:
    """One model with its source."""
    return _dumps({**_model_document(model), "source": source})


def model_page(model: Model, source: str, *, width: int) -> str:
    """Every field of a model, and where it is published."""
    fields = [pair for key, value in _model_document(model).items() for pair in _flat(key, value)]
    return blocks(facts(fields, width=width), wrapped(f"Source: {source}", width=width))


def _model_document(model: Model) -> dict[str, Any]:
    return {
        **asdict(model),
        "parameters": parameter_count(model),
        "active_parameters": active_parameter_count(model),
    }


def _flat(key: str, value: Any) -> list[tuple[str, str]]:
    """`key.inner  text` pairs of a nested value."""
    match value:
        case dict():
            return [pair for k, v in value.items() for pair in _flat(f"{key}.{k}", v)]
        case list() | tuple() if value and isinstance(value[0], dict):
            return [pair for i, v in enumerate(value) for pair in _flat(f"{key}.{i}", v)]
        case list() | tuple():
            return [(key, ", ".join(map(str, value)))]
        case float():
            return [(key, f"{value:g}")]
        case None:
            return [(key, "none")]
        case _:
            return [(key, str(value))]


def _dumps(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2)
