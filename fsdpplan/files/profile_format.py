"""The TOML format of hardware profiles: one device, node type or cluster a file, and `physics`.

`physics` holds the numbers that all CUDA devices share. A device or level without measurements of
its own names its relative (`fitted_as`), whose fitted numbers it takes; what it gives itself goes
before both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.profile_folder import profiles_folder
from fsdpplan.files.profile_levels import LevelProfile, Relatives, read_level
from fsdpplan.files.profile_numbers import (
    SourcedNumbers,
    Sources,
    checked,
    parse_toml,
    read_sources,
    taken_over,
    texts,
)
from fsdpplan.files.table import Table, path_text, read_text, short
from fsdpplan.spec.cluster import Device, DeviceFit, DeviceKind, Evidence, StepError

ProfileKind = Literal["device", "node", "cluster", "physics"]

SCHEMA_VERSION = 1
LIMIT_BYTES = 256 * 1024
PHYSICS = "physics"
POWER = "power_fraction"
"""Power limit of a device as a share of its relative's. Near its limit a chip takes power as the
third power of its clock (P = C V^2 f, and V grows as f), so that its sustained rate goes as the
cube root."""
DEVICE_FIT = (
    "matmul_fraction",
    "sustained_fraction",
    "attention_forward_fraction",
    "memory_fraction",
)
"""Fields of `DeviceFit` that belong to one device; `physics` has all others."""
_HEADER = ("schema_version", "kind", "name", "description", "sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicsProfile:
    """The fitted numbers that all CUDA devices share."""

    name: str
    fit: tuple[tuple[str, float], ...]
    """Fields of `DeviceFit` with their values."""
    errors: tuple[tuple[Evidence, StepError], ...]
    """How far step times are off, by the evidence behind a device's fitted numbers."""
    sources: Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A device and where its numbers come from."""

    device: Device
    nvml_names: tuple[str, ...]
    """Names under which NVML reports it."""
    fitted_as: str | None
    """Profile of the relative whose fitted numbers it takes; None where it has its own."""
    sources: Sources


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


Profile = DeviceProfile | NodeProfile | ClusterProfile | PhysicsProfile


def read_profile(path: Path) -> Profile:
    """The profile in the file at `path`; its relatives lie beside it or in the catalogue."""
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="profile")

    def relatives(name: str) -> Table:
        beside = path.parent / f"{name}.toml"
        return _document(beside) if _is_plain(name) and beside.is_file() else _catalogued(name)

    return parse_profile(text, where=path_text(path), relatives=relatives)


def parse_profile(text: str, *, where: str, relatives: Relatives | None = None) -> Profile:
    """The profile in `text`; `where` names the file in messages.

    `relatives` finds the profiles that it names; None: those of the catalogue.
    """
    relatives = relatives or _catalogued
    table = parse_toml(text, where=where)
    if table.integer("schema_version") != SCHEMA_VERSION:
        raise table.wrong("schema_version", f"{SCHEMA_VERSION}, the version read here")
    sources = read_sources(table.table("sources"))
    table.text("description")
    match table.choice("kind", get_args(ProfileKind)):
        case "device":
            return _device(table, sources, relatives)
        case "node":
            return _node(table, sources, relatives)
        case "physics":
            return _physics(table, sources)
        case _:
            return _cluster(table, sources)


def _document(path: Path) -> Table:
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="profile")
    return parse_toml(text, where=path_text(path))


@lru_cache(maxsize=64)
def _catalogued(name: str) -> Table:
    path = profiles_folder() / f"{name}.toml"
    if not _is_plain(name) or not path.is_file():
        raise ProfileNotFound(f"no hardware profile is called {short(name)}")
    return _document(path)


def _is_plain(name: str) -> bool:
    return name.isprintable() and len(name) < 100 and not set(name) & set("/\\")


def _physics(table: Table, sources: dict[str, str]) -> PhysicsProfile:
    table.refuse_unknown((*_HEADER, "fit", "error"))
    numbers = SourcedNumbers(table.table("fit"), sources, prefix="cluster.device.fit.")
    numbers.table.refuse_unknown({field.name for field in fields(DeviceFit)} - set(DEVICE_FIT))
    values = numbers.fields_of(DeviceFit, besides=frozenset(DEVICE_FIT))
    kinds: tuple[Evidence, ...] = get_args(Evidence)
    errors = {kind: _error(table.table("error").table(kind), sources) for kind in kinds}
    return PhysicsProfile(
        name=table.text("name"),
        fit=tuple(values.items()),
        errors=tuple((kind, error) for kind, (error, _) in errors.items()),
        sources=tuple(numbers.used),
    )


def _error(table: Table, sources: dict[str, str]) -> tuple[StepError, Sources]:
    """Errors by kind of part, each with its source."""
    numbers = SourcedNumbers(table, sources, prefix="cluster.device.error.")
    table.refuse_unknown(field.name for field in fields(StepError))
    values = numbers.fields_of(StepError, besides=frozenset())
    return checked(table, lambda: StepError(**values)), tuple(numbers.used)


def _device_error(
    table: Table,
    sources: dict[str, str],
    kind: DeviceKind,
    evidence: Evidence,
    relatives: Relatives,
) -> tuple[StepError, Sources]:
    """A device's own errors, or those of `physics` for its evidence."""
    if kind == "cpu" or "error" in table.values:
        return _error(table.table("error"), sources)
    document = relatives(PHYSICS)
    by_kind = document.table("error").table(evidence)
    return _error(by_kind, read_sources(document.table("sources")))


def _device(table: Table, sources: dict[str, str], relatives: Relatives) -> DeviceProfile:
    known = ("torch_device", "nvml_names", "evidence", "fitted_as", "numbers", "fit", "error")
    table.refuse_unknown((*_HEADER, *known, POWER))
    numbers = SourcedNumbers(table.table("numbers"), sources, prefix="cluster.device.")
    besides = frozenset({"name", "kind", "evidence", "fit", "error"})
    numbers.table.refuse_unknown({field.name for field in fields(Device)} - besides)
    # the one rate that a device may lack
    values: dict[str, Any] = {"peak_fp8_flops_per_second": None}
    absent = frozenset(set(values) - set(numbers.table.values))
    values |= numbers.fields_of(Device, besides=besides | absent)
    values["kind"] = table.choice("torch_device", get_args(DeviceKind))
    values["evidence"] = table.choice("evidence", get_args(Evidence))
    values["name"] = table.text("name")
    fitted_as = table.text("fitted_as") if "fitted_as" in table.values else None
    fit, fit_sources = _fit(table, sources, values["kind"], fitted_as, relatives)
    error, error_sources = _device_error(
        table, sources, values["kind"], values["evidence"], relatives
    )
    device = checked(table, lambda: Device(fit=DeviceFit(**fit), error=error, **values))
    return DeviceProfile(
        device=device,
        nvml_names=texts(table, "nvml_names"),
        fitted_as=fitted_as,
        sources=(*numbers.used, *fit_sources, *error_sources),
    )


def _fit(
    table: Table,
    sources: dict[str, str],
    kind: DeviceKind,
    fitted_as: str | None,
    relatives: Relatives,
) -> tuple[dict[str, Any], Sources]:
    """Fitted numbers by field: of `physics` (CUDA), then of the relative, then its own."""
    values: dict[str, Any] = {}
    named: dict[str, str] = {}
    if kind == "cuda":
        document = relatives(PHYSICS)
        physics = _physics(document, read_sources(document.table("sources")))
        values |= dict(physics.fit)
        named |= dict(physics.sources)
    if fitted_as is not None:
        relative = _relative_device(table, fitted_as, relatives)
        values |= {field: getattr(relative.device.fit, field) for field in DEVICE_FIT}
        named |= taken_over(relative.sources, "cluster.device.fit.", DEVICE_FIT, fitted_as)
        if POWER in table.values:
            power = SourcedNumbers(table, sources, prefix="cluster.device.fit.")
            share = min(1.0, power.read(POWER)) ** (1 / 3)
            values["sustained_fraction"] *= share
            named["cluster.device.fit.sustained_fraction"] = (
                f"{fitted_as}, times {share:.3f}, the cube root of the power limit: "
                f"{power.used[0][1]}"
            )
    elif POWER in table.values:
        raise table.wrong(POWER, "left out where there is no fitted_as")
    own = SourcedNumbers(
        table.table("fit")
        if "fit" in table.values or not values
        else Table(where=table.where, values={}),
        sources,
        prefix="cluster.device.fit.",
    )
    own.table.refuse_unknown(field.name for field in fields(DeviceFit))
    given = frozenset(set(values) - set(own.table.values))
    values |= own.fields_of(DeviceFit, besides=given)
    return values, tuple((named | dict(own.used)).items())


def _relative_device(table: Table, name: str, relatives: Relatives) -> DeviceProfile:
    if name != table.text("name"):
        document = relatives(name)
        if document.values.get("kind") == "device" and "fitted_as" not in document.values:
            return _device(document, read_sources(document.table("sources")), relatives)
    raise table.wrong("fitted_as", "the name of another device profile with a fit of its own")


def _node(table: Table, sources: dict[str, str], relatives: Relatives) -> NodeProfile:
    table.refuse_unknown((*_HEADER, "device", "gpus_per_node", "levels"))
    size = SourcedNumbers(table, sources, prefix="cluster.")
    any_size = table.require("gpus_per_node") == "any"
    gpus_per_node = None if any_size else size.integer("gpus_per_node")
    rows = table.require("levels")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise table.wrong("levels", "one or two [[levels]] tables")
    levels, used = [], list(size.used)
    for index, row in enumerate(rows):
        row_table = Table(where=table.where, values=row, prefix=f"levels[{index}].")
        level, level_sources = read_level(row_table, sources, relatives)
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


def _cluster(table: Table, sources: dict[str, str]) -> ClusterProfile:
    table.refuse_unknown((*_HEADER, "node", "gpus"))
    numbers = SourcedNumbers(table, sources, prefix="cluster.")
    return ClusterProfile(
        name=table.text("name"),
        node=table.text("node"),
        gpus=numbers.integer("gpus"),
        sources=tuple(numbers.used),
    )
