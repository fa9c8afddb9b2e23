"""Calibrated: a cluster with the numbers that were measured on it, and how each was found.

What was measured replaces what the profile had; all else stays. Of each kind of part of a step the
error becomes that of measured devices, or what the fit itself leaves unexplained if that is more;
kinds of which nothing was measured keep theirs.

Sources of what a calibration found: how each number was measured, for the profile to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.catalogue import load_profile
from fsdpplan.files.profiles.devices import PHYSICS, PhysicsProfile
from fsdpplan.files.profiles.measured import NumberSource
from fsdpplan.spec.cluster import Cluster, Evidence, Level, StepError
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMachine, Measurement
from fsdpplan.spec.nodes import compress_host_list
from fsdpplan.units import MIB, format_bandwidth, format_gib, format_percent
from fsdpplan.validate.calibrate.device import DeviceCalibration, calibrate_device
from fsdpplan.validate.calibrate.levels import LevelFit, calibrate_levels
from fsdpplan.validate.calibrate.peaks import DeviceNumber
from fsdpplan.validate.compare.alpha_beta import CallFit, call_fits
from fsdpplan.validate.compare.measured_kernels import usable


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


KINDS = {
    "matmul_fraction": "matmul_fraction",
    "attention_forward_fraction": "attention_fraction",
    "memory_fraction": "element_wise_fraction",
    "kernel_launch_seconds": "launch_fraction",
}
"""Field of the error that is known by each measured number."""
OF_EVERY_STEP = ("matmul_fraction", "attention_forward_fraction", "memory_fraction")
"""With these a device is measured."""
TOLD_SPREAD = 0.05
"""Ranks that differ by less are equal."""
TELLING_BYTES = 8 * MIB
"""Calls of so many bytes show a bandwidth; smaller ones the cost of a start and a protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was found."""

    machine: MeasuredMachine
    cluster: Cluster
    """As the profile has it, with what was measured."""
    device: DeviceCalibration
    levels: tuple[LevelFit | None, ...]
    """One for each level of the cluster; None: not measured."""
    calls: tuple[CallFit, ...]
    """The same calls by collective and group, for showing."""
    sources: Mapping[str, NumberSource]
    """How each measured number was found, by field such as `cluster.device.fit.matmul_fraction`."""
    notes: tuple[str, ...]
    """What the user should know, in sentences."""

    @property
    def taken_over(self) -> tuple[str, ...]:
        """Names of the levels that keep the profile's numbers."""
        named = zip(self.cluster.levels, self.levels, strict=True)
        return tuple(level.name for level, fit in named if fit is None)


def calibrated(measurements: Sequence[Measurement], cluster: Cluster) -> Calibration:
    """`cluster` with the numbers of the log in place of its own.

    It has nodes as measured; it may have more of them, and levels that the log did not reach.
    """
    measurements = usable(measurements)
    machine = machine_of(measurements)
    measured = as_measured(cluster, machine)
    calls = [row for row in measurements if isinstance(row, MeasuredCall)]
    device = calibrate_device(measurements, cluster.device)
    reached = calibrate_levels(calls, replace(measured, device=device.device))
    levels = (*reached, *[None] * (len(cluster.levels) - len(reached)))
    errors = _errors(device, cluster, levels)
    known = all(field in device.numbers for field in OF_EVERY_STEP)
    evidence: Evidence = "measured" if known else cluster.device.evidence
    found = replace(
        cluster,
        device=replace(device.device, error=errors, evidence=evidence),
        levels=tuple(
            level
            if fit is None
            else replace(fit.level, domain_gpus=level.domain_gpus, whole_gpus=level.whole_gpus)
            for level, fit in zip(cluster.levels, levels, strict=True)
        ),
        weak=(),  # what was weak was measured with the rest
    )
    calibration = Calibration(
        machine=machine,
        cluster=found,
        device=device,
        levels=levels,
        calls=call_fits(calls),
        sources={},
        notes=(),
    )
    return replace(
        calibration,
        sources=measured_sources(
            machine, cluster=found, device=device, levels=levels, before=cluster.device.error
        ),
        notes=tuple(_notes(calibration, cluster)),
    )


def machine_of(measurements: Iterable[Measurement]) -> MeasuredMachine:
    """What was measured on. Raises SpecError where the log does not say."""
    machines = [row for row in measurements if isinstance(row, MeasuredMachine)]
    if len(machines) != 1:
        raise SpecError(
            f"the log has {len(machines)} rows that say what it was measured on: it must have one; "
            "measure again with `fsdpplan calibrate`"
        )
    machine = machines[0]
    if machine.ranks_per_node * len(machine.hosts) != machine.world:
        raise SpecError(
            f"the log speaks of {machine.world} ranks on {len(machine.hosts)} hosts with "
            f"{machine.ranks_per_node} each: measure again with `fsdpplan calibrate`"
        )
    return machine


def as_measured(cluster: Cluster, machine: MeasuredMachine) -> Cluster:
    """The part of `cluster` that was measured. Raises SpecError where it is another machine."""
    if machine.device_kind != cluster.device.kind:
        raise SpecError(
            f"the log was measured on {machine.device_name} ({machine.device_kind}), but "
            f"{cluster.name} has {cluster.device.kind} devices: name another profile with "
            "--hardware"
        )
    if machine.ranks_per_node != cluster.gpus_per_node or machine.world > cluster.gpus:
        raise SpecError(
            f"the log has {machine.world} ranks, {machine.ranks_per_node} a host, but the cluster "
            f"{cluster.gpus} with {cluster.gpus_per_node} a node; they must agree"
        )
    levels: list[Level] = []
    for level in cluster.levels:
        levels.append(replace(level, domain_gpus=min(level.domain_gpus, machine.world)))
        if level.domain_gpus >= machine.world:
            break
    return replace(cluster, gpus=machine.world, levels=tuple(levels))


def measured_error() -> StepError:
    """How far steps are off on CUDA devices that were measured."""
    physics = load_profile(PHYSICS)
    assert isinstance(physics, PhysicsProfile)
    return dict(physics.errors)["measured"]


def _errors(
    device: DeviceCalibration, cluster: Cluster, levels: Sequence[LevelFit | None]
) -> StepError:
    """Errors after measuring.

    Of CPU processes none were held out: their kinds of parts keep the profile's errors at least,
    and that of every step, which stood for a CPU that nobody had measured, becomes what the fits
    leave over and what ranks differ by, since processes of one host disturb each other.
    """
    before, measured = cluster.device.error, measured_error()
    least = before if device.device.kind == "cpu" else measured
    found: dict[str, float] = {}
    for field, kind in KINDS.items():
        if field in device.numbers:
            found[kind] = max(getattr(least, kind), device.numbers[field].residual_fraction)
    if all(field in device.numbers for field in OF_EVERY_STEP):
        found["base_fraction"] = max(measured.base_fraction, _disturbance(device))
    inside, across = _link_error(levels[:1]), _link_error(levels[1:])
    if inside is not None:
        found["inside_fraction"] = max(least.inside_fraction, inside)
    if across is not None:
        found["across_fraction"] = max(least.across_fraction, across)
    return replace(before, **{kind: float(f"{error:.3g}") for kind, error in found.items()})


def _link_error(fits: Sequence[LevelFit | None]) -> float | None:
    """What the fits of these levels leave open; None where the bandwidth of one was not measured,
    so that its profile's error stands."""
    known = [fit for fit in fits if fit is not None and fit.largest_bytes >= TELLING_BYTES]
    if not known or len(known) < len(fits):
        return None
    return max(
        max(fit.residual_fraction, fit.numbers["bandwidth_fraction"].error_fraction)
        for fit in known
    )


def _disturbance(device: DeviceCalibration) -> float:
    """The worst residual of a CPU's numbers, or the most that its ranks differ by; 0 on a GPU."""
    if device.device.kind != "cpu":
        return 0.0
    numbers = [device.numbers[field] for field in OF_EVERY_STEP]
    return max(max(number.residual_fraction, number.spread_fraction) for number in numbers)


def _notes(calibration: Calibration, before: Cluster) -> Iterable[str]:
    machine, device = calibration.machine, before.device
    memory = machine.memory_bytes
    if memory is not None and abs(memory / device.memory_bytes - 1) > TOLD_SPREAD:
        yield (
            f"torch sees {format_gib(memory)} on a device, the profile of {device.name} had "
            f"{format_gib(device.memory_bytes)}: check that it is the right one (--hardware)"
        )
    uneven = [
        f"{format_percent(number.spread_fraction)} in {field}"
        for field, number in calibration.device.numbers.items()
        if number.spread_fraction > TOLD_SPREAD
    ]
    if uneven:
        yield f"ranks differ by up to {', '.join(uneven)}; --check says which is slow"
    for level, fit in zip(before.levels, calibration.levels, strict=True):
        if fit is None or device.kind == "cpu":
            continue
        more = fit.level.port_bandwidth_bytes_per_second
        if more > level.port_bandwidth_bytes_per_second:
            yield (
                f"{level.name} carries {format_bandwidth(more)} a port, more than the "
                f"{format_bandwidth(level.port_bandwidth_bytes_per_second)} of the profile, which "
                "is too low"
            )
    if calibration.taken_over and machine.world > 1:
        yield f"not measured, taken over: {', '.join(calibration.taken_over)}"
    for level, fit in zip(before.levels, calibration.levels, strict=True):
        if fit is not None and fit.largest_bytes < TELLING_BYTES:
            yield (
                f"{level.name} was measured up to {format_gib(fit.largest_bytes)} only, which does "
                "not show its bandwidth: give it more time by --seconds"
            )
    missing = [field for field in OF_EVERY_STEP if field not in calibration.device.numbers]
    if missing:
        yield f"not measured, taken over: {', '.join(missing)}"
