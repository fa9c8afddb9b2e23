"""`fsdpplan verify`: a finished run against its plan, with limits that decide the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import fraction, path
from fsdpplan.cli.options.question import Json
from fsdpplan.cli.views.told import tell
from fsdpplan.units import parse_bytes

RunPlace = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's folder or its metrics file. Default: the newest in fsdpplan-runs.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Which plan, and what the run must keep to."""

    HEADING: ClassVar[str] = "Verify"

    plan_file: Annotated[
        Path | None,
        Flag(
            name="--plan",
            metavar="PATH",
            parse=path,
            help="The plan that it ran. Default: that of the script beside its metrics.",
        ),
    ] = None
    min_mfu: Annotated[
        float | None,
        Flag(metavar="40%", parse=fraction, help="Least MFU; exit 6 below it."),
    ] = None
    max_reserved: Annotated[
        int | None,
        Flag(
            metavar="75GiB",
            parse=parse_bytes,
            help="Most memory reserved on any GPU; exit 6 above it.",
        ),
    ] = None
    max_error: Annotated[
        float | None,
        Flag(
            metavar="15%",
            parse=fraction,
            help="Most that the predicted step time may be off; exit 6 above it.",
        ),
    ] = None


def verify(*, run: RunPlace = "", options: VerifyOptions, json: Json = False) -> None:
    """Compare a finished run with its plan; gates."""
    from fsdpplan.cli.views import verification
    from fsdpplan.cli.views.render import columns

    verified = verification.verified(run, options)
    failure = verification.failure(verified)
    if json:
        typer.echo(verification.verified_json(verified, failure))
    else:
        typer.echo(verification.verified_screen(verified, width=columns()))
    if failure is not None:
        tell(str(failure))
        raise typer.Exit(failure.exit_code)
