"""`fsdpplan calibrate`: measure this machine, write a profile of it, or check it against one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import fraction, line, path, positive, whole
from fsdpplan.cli.views.told import tell

DEFAULT_SAVE = "measured.toml"


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
        Flag(metavar="S", parse=positive(example="90"), help="Time for all of it. Default 90."),
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
            metavar="LOG.jsonl",
            parse=path,
            help="Measure nothing; read what was measured before.",
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
    from fsdpplan.cli.resolve import calibration
    from fsdpplan.cli.views import calibration as screen_calibration
    from fsdpplan.cli.views import calibration_json
    from fsdpplan.cli.views.render import columns

    calibration.refuse_contradictions(measuring, profile)
    measured = calibration.measure(measuring, profile)
    if profile.check:
        checked = calibration.checked(measured, tolerance=profile.tolerance)
        failure = calibration.failure(checked)
        if json:
            typer.echo(calibration_json.check_json(checked, failure))
        else:
            typer.echo(screen_calibration.check_screen(checked, width=columns()))
        if failure is not None:
            tell(str(failure))
            raise typer.Exit(failure.exit_code)
        return
    fitted = calibration.fitted(measured, place=profile.save or Path(DEFAULT_SAVE))
    if json:
        typer.echo(calibration_json.calibration_json(fitted))
    else:
        typer.echo(screen_calibration.calibration_screen(fitted, width=columns()))
    typer.echo(calibration.next_words(fitted), err=True)
