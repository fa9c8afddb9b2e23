"""`fsdpplan cancel`: end what this folder launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import line
from fsdpplan.cli.options.question import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOptions:
    """Which runs."""

    HEADING: ClassVar[str] = "Cancel"

    job: Annotated[
        str | None,
        Flag(metavar="ID", parse=line, help="Which run. Default: the one that goes on."),
    ] = None
    every: Annotated[
        bool | None, Flag(name="--all", help="All runs of this folder that go on.")
    ] = None


def cancel(*, options: CancelOptions, json: Json = False) -> None:
    """End a run of this folder."""
    from fsdpplan.cli.views import cancelling

    done = cancelling.cancelled(options)
    if json:
        typer.echo(cancelling.cancelled_json(done))
        return
    for each in done:
        typer.echo(each.words)
