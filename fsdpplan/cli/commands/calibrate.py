"""`fsdpplan calibrate`: measure this machine, write a profile of it, or check it against one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options import offered
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import fraction, line, path, positive, whole
from fsdpplan.cli.resolve import calibration
from fsdpplan.cli.resolve.calibration import (
    Measured,
    Start,
    detected_start,
    device_of,
    named_start,
    start_cluster,
    start_of_log,
    visible_devices,
)
from fsdpplan.cli.views import calibration as views
from fsdpplan.cli.views.render import columns, note, tell
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import Flags, cluster_of
from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.run.calibrate import measure as measuring_program
from fsdpplan.run.calibrate.variables import network_variables
from fsdpplan.run.engines.machine import this_machine
from fsdpplan.run.plans import read_plan
from fsdpplan.topology.measure.settings import DEFAULT_SECONDS, Settings
from fsdpplan.validate.calibrate.calibrated import machine_of

DEFAULT_SAVE = "measured.toml"

CHECK_LOG = "check.jsonl"
"""Where --check keeps its log: that of the profile stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions:
    """What is measured."""

    HEADING: ClassVar[str] = "Measuring"

    processes: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=4),
            help="Processes on each node. Default: one a GPU.",
        ),
    ] = None
    nodes: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=2),
            help="Nodes. Default: those of the Slurm allocation that this is in, else this one.",
        ),
    ] = None
    seconds: Annotated[
        float | None,
        Flag(metavar="S", parse=positive(example="60"), help="Time for all of it. Default 60."),
    ] = None
    plan: Annotated[
        Path | None,
        Flag(
            metavar="PLAN",
            parse=path,
            help="Measure the matmuls, the attention and the mesh axes of this plan.",
        ),
    ] = None
    log: Annotated[
        Path | None,
        Flag(
            name="--from",
            metavar="LOG",
            parse=path,
            help="Measure nothing; read what was measured before, or what nccl-tests printed.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What becomes of it."""

    HEADING: ClassVar[str] = "Profile"

    hardware: Annotated[
        str | None,
        Flag(
            metavar="NAME|PATH",
            parse=line,
            help="The profile to start from, or with --check to compare with; `cpu` for CPU "
            "processes. Default: what is found here.",
            offered=offered.machines,
        ),
    ] = None
    save: Annotated[
        Path | None,
        Flag(
            metavar="PATH",
            parse=path,
            help=f"Where to write the measured profile. Default: {DEFAULT_SAVE}.",
        ),
    ] = None
    check: Annotated[
        bool | None,
        Flag(
            name="--check",
            help="Write no profile; exit 6 where the machine is slower than the profile says.",
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        Flag(
            metavar="20%",
            parse=fraction,
            help="With --check: how much slower is still healthy. Default 20%.",
        ),
    ] = None


def calibrate(*, measuring: MeasuringOptions, profile: ProfileOptions, json: Json = False) -> None:
    """Measure this machine: write its profile, or check it."""
    refuse_contradictions(measuring, profile)
    measured = measure(measuring, profile)
    if profile.check:
        checked = calibration.checked(measured, tolerance=profile.tolerance)
        failure = calibration.failure(checked)
        if json:
            typer.echo(views.check_json(checked, failure))
        else:
            typer.echo(views.check_screen(checked, width=columns()))
        if failure is not None:
            tell(str(failure))
            raise typer.Exit(failure.exit_code)
        return
    fitted = calibration.fitted(measured, place=profile.save or Path(DEFAULT_SAVE))
    if json:
        typer.echo(views.calibration_json(fitted))
    else:
        typer.echo(views.calibration_screen(fitted, width=columns()))
    note(calibration.next_words(fitted))


def refuse_contradictions(measuring: MeasuringOptions, profile: ProfileOptions) -> None:
    """Raise SpecError where options do not go together."""
    if profile.tolerance is not None and not profile.check:
        raise SpecError("--tolerance says when --check fails: add --check, or leave it out")
    if profile.check and profile.save is not None:
        raise SpecError("--check writes no profile: leave out --save, or calibrate without --check")
    fixed = ("processes", "nodes", "seconds", "plan")
    given = [f"--{name}" for name in fixed if getattr(measuring, name) is not None]
    if measuring.log is not None and given:
        raise SpecError(f"--from measures nothing: leave out {', '.join(given)}")


def measure(measuring: MeasuringOptions, profile: ProfileOptions) -> Measured:
    """Measure here, or read what was measured before."""
    if measuring.log is not None:
        rows = read_measurements(measuring.log)
        machine = machine_of(rows)
        start = named_start(profile.hardware) or start_of_log(machine)
        log = measuring.log
    else:
        start = named_start(profile.hardware) or detected_start()
        working.stop()  # measuring has a display of its own
        log = _measured_log(measuring, profile, start)
        rows = read_measurements(log)
        machine = machine_of(rows)
    return Measured(
        rows=rows, machine=machine, start=start, loaded=start_cluster(start, machine), log=log
    )


def _measured_log(measuring: MeasuringOptions, profile: ProfileOptions, start: Start) -> Path:
    kind = device_of(start).device.kind
    settings = Settings(device=kind, seconds=measuring.seconds or DEFAULT_SECONDS)
    if measuring.plan is not None:
        settings = measuring_program.settings_for_plan(settings, read_plan(measuring.plan))
    ranks = measuring_program.Ranks(
        device=kind,
        processes=measuring.processes or visible_devices(kind, start),
        nodes=measuring.nodes or max(1, this_machine().allocation_nodes),
    )
    place = profile.save or Path(DEFAULT_SAVE)
    out = place.with_name(CHECK_LOG) if profile.check else place.with_suffix(".jsonl")
    variables = _variables(start, ranks) if kind == "cuda" else {}
    return measuring_program.measure(settings, ranks=ranks, out=out, environment=variables)


def _variables(start: Start, ranks: measuring_program.Ranks) -> dict[str, str]:
    """What the script of a job on these nodes would set of NCCL's network."""
    flags = Flags(gpus=ranks.nodes * ranks.processes, gpus_per_node=ranks.processes)
    cluster = cluster_of(start.profile, start.folder, flags).cluster
    return network_variables(cluster, exported=os.environ)
