"""The TOML format of hardware profiles: one device, node type or cluster a file.

Every number is written `key = { value = 1.0, source = "name" }`, where `[sources.name]` says what
it is taken from. A number without a source is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from fsdpplan.errors import SpecError
from fsdpplan.files.table import UNREADABLE, Table, path_text, read_text, short
from fsdpplan.spec.cluster import Device, DeviceFit, DeviceKind, Evidence, Level

ProfileKind = Literal["device", "node", "cluster"]
Joins = Literal["node", "cluster"]
Sources = tuple[tuple[str, str], ...]
Value = TypeVar("Value")

SCHEMA_VERSION = 1
LIMIT_BYTES = 256 * 1024
_HEADER = ("schema_version", "kind", "name", "description", "sources")
_SOURCE_KEYS = ("what", "url", "how", "measured_on", "date")
_INTEGERS = ("memory_bytes", "multiprocessors", "context_bytes", "communicator_bytes", "ports")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A device and where its numbers come from."""

    device: Device
    nvml_names: tuple[str, ...]
    """Names under which NVML reports it."""
    sources: Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelProfile:
    """One level of links before the number of GPUs is known."""

    joins: Joins
    """`node`: the GPUs of one node; `cluster`: all nodes."""
    level: Level
    """Complete but for `domain_gpus`, which stands at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """A node type: its device and the links inside it and out of it."""

    name: str
    device: str
    """Name of the device's profile."""
    gpus_per_node: int | None
    """None: any number (processes of one machine)."""
    levels: tuple[LevelProfile, ...]
    """Inside the node; then, unless the node stands alone, between nodes."""
    sources: Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """A number of GPUs in nodes of one type."""

    name: str
    node: str
    """Name of the node's profile."""
    gpus: int
    sources: Sources


Profile = DeviceProfile | NodeProfile | ClusterProfile


def read_profile(path: Path) -> Profile:
    """The profile in the file at `path`."""
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="profile")
    return parse_profile(text, where=path_text(path))


def parse_profile(text: str, *, where: str) -> Profile:
    """The profile in `text`; `where` names the file in messages."""
    table = _parse_toml(text, where=where)
    if table.integer("schema_version") != SCHEMA_VERSION:
        raise table.wrong("schema_version", f"{SCHEMA_VERSION}, the version read here")
    sources = _read_sources(table.table("sources"))
    table.text("description")
    match table.choice("kind", get_args(ProfileKind)):
        case "device":
            return _device(table, sources)
        case "node":
            return _node(table, sources)
        case _:
            return _cluster(table, sources)


def _parse_toml(text: str, *, where: str) -> Table:
    try:
        return Table(where=where, values=tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where} is not TOML: {error}") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise SpecError(f"{where} cannot be read as TOML: {UNREADABLE}") from error


def _read_sources(table: Table) -> dict[str, str]:
    """Each source as one line of text."""
    lines: dict[str, str] = {}
    for key in table.values:
        entry = table.table(key)
        entry.refuse_unknown(_SOURCE_KEYS)
        entry.text("what")
        parts = [entry.text(part) for part in _SOURCE_KEYS if part in entry.values]
        lines[key] = "; ".join(parts)
    return lines


class _SourcedNumbers:
    """Reads the numbers of one table and remembers the source of each."""

    def __init__(self, table: Table, sources: dict[str, str], *, prefix: str) -> None:
        self.table = table
        self.used: list[tuple[str, str]] = []
        self._sources = sources
        self._prefix = prefix

    def _entry(self, key: str) -> Table:
        """The inline table of `key`, its source checked and remembered."""
        if not isinstance(self.table.require(key), dict):
            raise self.table.wrong(key, 'written { value = ..., source = "..." }')
        entry = self.table.table(key)
        entry.refuse_unknown(("value", "source"))
        source = entry.text("source")
        if source not in self._sources:
            raise entry.wrong("source", f"one of [sources]: {', '.join(sorted(self._sources))}")
        self.used.append((f"{self._prefix}{key}", self._sources[source]))
        return entry

    def read(self, key: str) -> int | float:
        """A whole number where the field counts bytes or things, else a finite number."""
        entry = self._entry(key)
        return entry.integer("value", lowest=0) if key in _INTEGERS else entry.number("value")

    def fields_of(self, spec: type, *, besides: frozenset[str]) -> dict[str, Any]:
        """The numbers of a dataclass by field; one that has a default may be left out."""
        numbers = [field for field in fields(spec) if field.name not in besides]
        optional = {field.name for field in numbers if field.default is not MISSING}
        return {
            field.name: self.read(field.name)
            for field in numbers
            if field.name in self.table.values or field.name not in optional
        }

    def integer(self, key: str) -> int:
        """A whole number of at least 1."""
        return self._entry(key).integer("value")

    def flag(self, key: str) -> bool:
        """True or false."""
        return self._entry(key).flag("value")


def _device(table: Table, sources: dict[str, str]) -> DeviceProfile:
    table.refuse_unknown((*_HEADER, "torch_device", "nvml_names", "evidence", "numbers", "fit"))
    numbers = _SourcedNumbers(table.table("numbers"), sources, prefix="cluster.device.")
    fit = _SourcedNumbers(table.table("fit"), sources, prefix="cluster.device.fit.")
    besides = frozenset({"name", "kind", "evidence", "fit"})
    numbers.table.refuse_unknown({field.name for field in fields(Device)} - besides)
    fit.table.refuse_unknown(field.name for field in fields(DeviceFit))
    # the one rate that a device may lack
    values: dict[str, Any] = {"peak_fp8_flops_per_second": None}
    absent = frozenset(set(values) - set(numbers.table.values))
    values |= numbers.fields_of(Device, besides=besides | absent)
    values["kind"] = table.choice("torch_device", get_args(DeviceKind))
    values["evidence"] = table.choice("evidence", get_args(Evidence))
    values["name"] = table.text("name")
    fit_values = fit.fields_of(DeviceFit, besides=frozenset())
    device = _checked(table, lambda: Device(fit=DeviceFit(**fit_values), **values))
    return DeviceProfile(
        device=device,
        nvml_names=_texts(table, "nvml_names"),
        sources=(*numbers.used, *fit.used),
    )


def _node(table: Table, sources: dict[str, str]) -> NodeProfile:
    table.refuse_unknown((*_HEADER, "device", "gpus_per_node", "levels"))
    size = _SourcedNumbers(table, sources, prefix="cluster.")
    any_size = table.require("gpus_per_node") == "any"
    gpus_per_node = None if any_size else size.integer("gpus_per_node")
    rows = table.require("levels")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise table.wrong("levels", "one or two [[levels]] tables")
    levels, used = [], list(size.used)
    for index, row in enumerate(rows):
        row_table = Table(where=table.where, values=row, prefix=f"levels[{index}].")
        level, level_sources = _level(row_table, sources)
        levels.append(level)
        used += level_sources
    joins = [level.joins for level in levels]
    if joins not in (["node"], ["node", "cluster"]):
        raise SpecError(
            f'{table.where}: levels must be one with joins = "node", then at most one with '
            f'joins = "cluster", not {short(joins)}'
        )
    return NodeProfile(
        name=table.text("name"),
        device=table.text("device"),
        gpus_per_node=gpus_per_node,
        levels=tuple(levels),
        sources=tuple(used),
    )


def _level(table: Table, sources: dict[str, str]) -> tuple[LevelProfile, Sources]:
    besides = frozenset({"name", "domain_gpus", "gpudirect"})
    keys = {field.name for field in fields(Level)} - besides
    table.refuse_unknown((*keys, "name", "joins", "gpudirect"))
    name = table.text("name")
    numbers = _SourcedNumbers(table, sources, prefix=f"cluster.levels.{name}.")
    values = numbers.fields_of(Level, besides=besides)
    gpudirect = numbers.flag("gpudirect")
    level = _checked(table, lambda: Level(name=name, domain_gpus=1, gpudirect=gpudirect, **values))
    joins: Joins = "node" if table.choice("joins", get_args(Joins)) == "node" else "cluster"
    return LevelProfile(joins=joins, level=level), tuple(numbers.used)


def _cluster(table: Table, sources: dict[str, str]) -> ClusterProfile:
    table.refuse_unknown((*_HEADER, "node", "gpus"))
    numbers = _SourcedNumbers(table, sources, prefix="cluster.")
    return ClusterProfile(
        name=table.text("name"),
        node=table.text("node"),
        gpus=numbers.integer("gpus"),
        sources=tuple(numbers.used),
    )


def _texts(table: Table, key: str) -> tuple[str, ...]:
    values = table.require(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise table.wrong(key, "a list of texts")
    return tuple(values)


def _checked(table: Table, build: Callable[[], Value]) -> Value:
    """`build()`, its complaint headed by the file."""
    try:
        return build()
    except SpecError as error:
        raise SpecError(f"{table.where}: {table.prefix}{error}") from error
