"""Device profiles and `physics`: peaks and fitted numbers of one device, each with its source.

`physics` holds the numbers that all CUDA devices share. A device without measurements of its own
names its relative (`fitted_as`), whose fitted numbers it takes; what it gives itself goes before
both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args

from fsdpplan.files.profiles.numbers import (
    Relatives,
    SourcedNumbers,
    Sources,
    checked,
    read_sources,
    taken_over,
    texts,
)
from fsdpplan.files.table import Table
from fsdpplan.spec.cluster import Device, DeviceFit, DeviceKind, Evidence, StepError, Vendor

PHYSICS = "physics"
POWER = "power_fraction"
"""Power limit of a device as a share of its relative's. Near its limit a chip takes power as the
third power of its clock (P = C V^2 f, and V grows as f), so that its sustained rate goes as the
cube root."""
DEVICE_FIT = (
    "matmul_fraction",
    "sustained_fraction",
    "stack_fraction",
    "attention_forward_fraction",
    "memory_fraction",
)
"""Fields of `DeviceFit` that belong to one device; `physics` has all others."""
DEVICE_LOAN = (
    *DEVICE_FIT,
    "matmul_fill_depth",
    "matmul_wave_fraction",
    "matmul_start_seconds",
    "throttled_fraction",
    "unaligned_fraction",
)
"""Fields that a relative gives: those, and what a device may have of its own beside `physics`."""
WORDS = ("compute_capability", "skypilot_name")
"""Fields of `Device` that are text and may be left out."""
NO_NUMBERS = frozenset(
    {"name", "kind", "evidence", "fit", "error", "vendor", "learned_peaks", *WORDS}
)
"""Fields of `Device` that do not stand among the numbers of its profile."""
TABLE_WORDS = ("table_name", "table_node")
"""What a device that tables of measured runs name has besides, both or none."""
DEVICE_KEYS = (
    "name",
    "description",
    "torch_device",
    "vendor",
    "nvml_names",
    *WORDS,
    *TABLE_WORDS,
    "evidence",
    "fitted_as",
    "numbers",
    "fit",
    "error",
    POWER,
)
"""What a device has in a file of its own (beside the header), or as a table of a node."""


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
    table_name: str | None
    """How tables of measured runs call it, `H100-80GB`: what else a part is told by stands behind
    its memory."""
    table_node: str | None
    """Node profile that it has in such a table where the network is not one of another node's."""
    sources: Sources


def read_physics(table: Table, sources: dict[str, str]) -> PhysicsProfile:
    """All of `physics`, whose header is checked."""
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


def read_device(table: Table, sources: dict[str, str], relatives: Relatives) -> DeviceProfile:
    """One device, whose keys are checked to be `DEVICE_KEYS` and a header at most."""
    numbers = SourcedNumbers(table.table("numbers"), sources, prefix="cluster.device.")
    numbers.table.refuse_unknown({field.name for field in fields(Device)} - NO_NUMBERS)
    # the one rate that a device may lack
    values: dict[str, Any] = {"peak_fp8_flops_per_second": None}
    absent = frozenset(set(values) - set(numbers.table.values))
    values |= numbers.fields_of(Device, besides=NO_NUMBERS | absent)
    values["kind"] = table.choice("torch_device", get_args(DeviceKind))
    if "vendor" in table.values:
        values["vendor"] = table.choice("vendor", get_args(Vendor))
    values["evidence"] = table.choice("evidence", get_args(Evidence))
    values |= {word: table.text(word) for word in WORDS if word in table.values}
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
        **_table_words(table),
        sources=(*numbers.used, *fit_sources, *error_sources),
    )


def _table_words(table: Table) -> dict[str, str | None]:
    """Both of `TABLE_WORDS`, or neither."""
    if any(word in table.values for word in TABLE_WORDS):
        return {word: table.text(word) for word in TABLE_WORDS}
    return dict.fromkeys(TABLE_WORDS)


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
        physics = read_physics(document, read_sources(document.table("sources")))
        values |= dict(physics.fit)
        named |= dict(physics.sources)
    if fitted_as is not None:
        relative = _relative_device(table, fitted_as, relatives)
        values |= {field: getattr(relative.device.fit, field) for field in DEVICE_LOAN}
        named |= taken_over(relative.sources, "cluster.device.fit.", DEVICE_LOAN, fitted_as)
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
            return read_device(document, read_sources(document.table("sources")), relatives)
    raise table.wrong("fitted_as", "the name of another device profile with a fit of its own")
