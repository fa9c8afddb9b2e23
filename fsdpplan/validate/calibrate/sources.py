"""Sources of what a calibration found: how each number was measured, for the profile to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from fsdpplan.files.profiles.measured import NumberSource
from fsdpplan.spec.cluster import Cluster, StepError
from fsdpplan.spec.host_list import compress_host_list
from fsdpplan.spec.measurement import MeasuredMachine
from fsdpplan.units import format_gib, format_percent
from fsdpplan.validate.calibrate.device import DeviceCalibration
from fsdpplan.validate.calibrate.levels import LevelFit
from fsdpplan.validate.calibrate.peaks import DeviceNumber


def measured_sources(
    machine: MeasuredMachine,
    *,
    cluster: Cluster,
    device: DeviceCalibration,
    levels: Sequence[LevelFit | None],
    before: StepError,
) -> dict[str, NumberSource]:
    """Source of each number of `cluster` that was measured, by field; `before`: its old errors."""

    def source(key: str, what: str, how: str) -> NumberSource:
        return NumberSource(
            key=key, what=what, how=how, measured_on=_where(machine), date=machine.date[:10]
        )

    processes = source("processes", "processes on each host", "as many as measured")
    sources = {"cluster.gpus_per_node": processes}
    for field, number in device.numbers.items():
        room = "cluster.device.fit." if hasattr(cluster.device.fit, field) else "cluster.device."
        sources[room + field] = source(f"measured_{field}", _what(field), _how(number))
    for level, fit in zip(cluster.levels, levels, strict=True):
        if fit is not None:
            what = f"collectives over {level.name}"
            how = source(f"measured_{level.name}", what, _level_how(fit))
            names = (*fit.numbers, *_new_ports(fit))
            sources |= {f"cluster.levels.{level.name}.{name}": how for name in names}
    changed = source(
        "measured_error",
        "errors of step times by kind of part",
        "what was held out for measured devices, or the residual of the fit where that is more",
    )
    after = cluster.device.error
    kinds = (field.name for field in fields(StepError))
    return sources | {
        f"cluster.device.error.{name}": changed
        for name in kinds
        if getattr(after, name) != getattr(before, name)
    }


def _where(machine: MeasuredMachine) -> str:
    nccl = f", NCCL {machine.nccl}" if machine.nccl else ""
    return (
        f"{machine.world} x {machine.device_name} on {compress_host_list(machine.hosts)} "
        f"({machine.backend}, torch {machine.torch}{nccl})"
    )


def _new_ports(fit: LevelFit) -> tuple[str, ...]:
    """The ports' bandwidth, where it was set to what was measured: no share of it is left."""
    return ("port_bandwidth_bytes_per_second",) if fit.level.bandwidth_fraction == 1.0 else ()


def _what(field: str) -> str:
    reported = field in ("memory_bytes", "multiprocessors")
    return "torch" if reported else f"kernels timed for {field}"


def _how(number: DeviceNumber) -> str:
    if not number.error_fraction and not number.residual_fraction:
        return "as reported" if number.rows == 1 else f"the best of {number.rows} rows"
    return (
        f"by fsdpplan calibrate: {number.rows} rows, residual "
        f"{format_percent(number.residual_fraction)}, standard error "
        f"{format_percent(number.error_fraction)}, ranks within "
        f"{format_percent(number.spread_fraction)}"
    )


def _level_how(fit: LevelFit) -> str:
    errors = ", ".join(
        f"{name} {format_percent(found.error_fraction)}" for name, found in fit.numbers.items()
    )
    return (
        f"by fsdpplan calibrate: {fit.rows} rows up to {format_gib(fit.largest_bytes)}, residual "
        f"{format_percent(fit.residual_fraction)}; standard errors: {errors}"
    )
