"""Measured profiles: a node with its device in one file, each number with how it was found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from fsdpplan.files.profiles.catalogue import load_profile
from fsdpplan.files.profiles.devices import NO_NUMBERS, PHYSICS, WORDS, PhysicsProfile
from fsdpplan.files.profiles.levels import Joins
from fsdpplan.files.profiles.nodes import HOST_MEMORY, HOST_RATE
from fsdpplan.files.profiles.text import (
    SourceNames,
    level_lines,
    network_lines,
    number_line,
    quoted,
)
from fsdpplan.spec.cluster import Cluster, Device, DeviceFit, StepError


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSource:
    """Where one number or several are from: what a table `[sources.NAME]` will say."""

    key: str
    """Name of the table; others with the same name get a number behind it."""
    what: str
    how: str | None = None
    measured_on: str | None = None
    date: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileHead:
    """What a profile says beside its numbers."""

    name: str
    description: str
    device_description: str
    nvml_names: tuple[str, ...]
    any_size: bool
    """A node has any number of devices: processes of one machine."""


class _Sources(SourceNames):
    """Gives each source a name, and remembers those that were used."""

    def __init__(self, sources: Mapping[str, NumberSource], start: str) -> None:
        self._sources = sources
        self._start = start
        self.used: dict[NumberSource, str] = {}

    def knows(self, field: str) -> bool:
        return field in self._sources

    def of(self, field: str) -> str:
        source = self._sources.get(field) or NumberSource(
            key="taken_over", what=f"as {self._start} has it"
        )
        if source not in self.used:
            stem = re.sub(r"[^A-Za-z0-9_-]", "_", source.key)
            taken = set(self.used.values())
            names = (stem, *(f"{stem}_{number}" for number in range(2, len(taken) + 3)))
            self.used[source] = next(name for name in names if name not in taken)
        return self.used[source]


def measured_profile_text(
    *, cluster: Cluster, sources: Mapping[str, NumberSource], head: ProfileHead
) -> str:
    """A node profile in TOML with all numbers of `cluster`, which stands for any number of nodes.

    `sources` are by field, such as `cluster.device.fit.matmul_fraction`; a number without one is
    said to be as `cluster.name` has it. What is weak is counted in, and not written again.
    """
    named = _Sources(sources, cluster.name)
    parts = [
        "\n".join(_head(cluster, head, named)),
        "\n".join(_device(cluster.device, head, named)),
        *("\n".join(_level(cluster, index, named)) for index in range(len(cluster.levels))),
    ]
    if cluster.network is not None:
        parts.append("\n".join(network_lines(cluster.network, named)))
    parts += ["\n".join(_source(name, source)) for source, name in named.used.items()]
    return "\n\n".join(parts) + "\n"


def _head(cluster: Cluster, head: ProfileHead, named: _Sources) -> Iterator[str]:
    yield "# Written by `fsdpplan calibrate`; rates are dense, bandwidths one direction."
    yield "schema_version = 1"
    yield 'kind = "node"'
    yield f"name = {quoted(head.name)}"
    yield f"description = {quoted(head.description)}"
    if head.any_size:
        yield 'gpus_per_node = "any"'
    else:
        yield number_line("gpus_per_node", cluster.gpus_per_node, named.of("cluster.gpus_per_node"))
    for name in (HOST_MEMORY, HOST_RATE):
        if (value := getattr(cluster, name)) is not None:
            yield number_line(name, value, named.of(f"cluster.{name}"))


def _device(device: Device, head: ProfileHead, named: _Sources) -> Iterator[str]:
    names = ", ".join(map(quoted, head.nvml_names))
    yield "[device]"
    yield f"name = {quoted(device.name)}"
    yield f"description = {quoted(head.device_description)}"
    yield f"torch_device = {quoted(device.kind)}"
    if device.kind == "cuda":
        yield f"vendor = {quoted(device.vendor)}"
    yield f"nvml_names = [{names}]"
    for word in WORDS:
        if (said := getattr(device, word)) is not None:
            yield f"{word} = {quoted(said)}"
    yield f"evidence = {quoted(device.evidence)}"
    yield "\n[device.numbers]"
    for field in fields(Device):
        value = getattr(device, field.name)
        if field.name not in NO_NUMBERS and value is not None:
            yield number_line(field.name, value, named.of(f"cluster.device.{field.name}"))
    yield "\n[device.fit]"
    shared = _shared_fit() if device.kind == "cuda" else {}
    for field in fields(DeviceFit):
        value, path = getattr(device.fit, field.name), f"cluster.device.fit.{field.name}"
        unsaid = value == field.default and not named.knows(path)
        if shared.get(field.name) != value and not unsaid:
            yield number_line(field.name, value, named.of(path))
    yield "\n[device.error]"
    for field in fields(StepError):
        path = f"cluster.device.error.{field.name}"
        yield number_line(field.name, getattr(device.error, field.name), named.of(path))


def _shared_fit() -> dict[str, float]:
    """What every CUDA device has of `physics` without saying so."""
    physics = load_profile(PHYSICS)
    assert isinstance(physics, PhysicsProfile)
    return dict(physics.fit)


def _level(cluster: Cluster, index: int, named: _Sources) -> Iterator[str]:
    level = cluster.levels[index]
    return level_lines(
        level, joins=_joins(cluster, index), domain_gpus=level.domain_gpus, names=named
    )


def _joins(cluster: Cluster, index: int) -> Joins:
    level = cluster.levels[index]
    if level.domain_gpus == cluster.gpus_per_node:
        return "node"
    return "cluster" if index == len(cluster.levels) - 1 else "domain"


def _source(name: str, source: NumberSource) -> Iterator[str]:
    yield f"[sources.{name}]"
    for key in ("what", "how", "measured_on", "date"):
        said = getattr(source, key)
        if said is not None:
            yield f"{key} = {quoted(said)}"
