"""`fsdpplan detect`: what this machine, or every node of an allocation, is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import line, path
from fsdpplan.cli.options.question import Json
from fsdpplan.cli.views.told import tell


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectOptions:
    """Which hosts to read, and what to keep."""

    HEADING: ClassVar[str] = "Hosts"

    nodes: Annotated[
        bool | None,
        Flag(name="--nodes", help="Every node of the Slurm allocation that this is in."),
    ] = None
    recordings: Annotated[
        tuple[Path, ...],
        Flag(
            name="--from",
            metavar="FILE",
            parse=path,
            many=True,
            help="A host that --record wrote, in place of this one; may be repeated.",
        ),
    ] = ()
    save: Annotated[
        str | None,
        Flag(
            metavar="NAME|PATH",
            parse=line,
            help="Write the cluster profile, for --hardware: NAME.toml here, or a path.",
        ),
    ] = None
    record: Annotated[
        Path | None,
        Flag(
            metavar="FILE",
            parse=path,
            help="Write all that was read of this host, to look at it elsewhere.",
        ),
    ] = None


def detect(*, options: DetectOptions, json: Json = False) -> None:
    """What this machine and its network are, and their profile."""
    from fsdpplan.cli.views import detection
    from fsdpplan.cli.views.render import columns

    seen = detection.look(options)
    said = detection.keep(seen, options)
    if json:
        typer.echo(detection.detect_json(seen))
    else:
        typer.echo(detection.detect_screen(seen, width=columns()))
    for sentence in said:
        typer.echo(sentence, err=True)
    if options.save is not None and seen.problem is not None:
        tell(f"nothing is saved in {options.save}: {seen.problem}")
        raise typer.Exit(seen.problem.exit_code)
