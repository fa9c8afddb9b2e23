"""`fsdpplan ledger`: all finished runs, and how far their plans were off."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import line, path
from fsdpplan.cli.options.question import Json, LedgerFile


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerViewOptions:
    """Which runs, and where they go."""

    HEADING: ClassVar[str] = "Ledger"

    ledger: LedgerFile = None
    cluster: Annotated[
        str | None,
        Flag(metavar="NAME", parse=line, help="Runs on this cluster only."),
    ] = None
    export: Annotated[
        Path | None,
        Flag(
            metavar="PATH",
            parse=path,
            help="Write the runs there, one JSON line each, without their folders.",
        ),
    ] = None


def ledger(*, options: LedgerViewOptions, json: Json = False) -> None:
    """Show finished runs and how far their plans were off."""
    from fsdpplan.cli.views import ledger as ledger_view
    from fsdpplan.cli.views.render import columns

    view = ledger_view.view(options)
    if options.export is not None:
        typer.echo(ledger_view.export(view, options.export), err=True)
    if json:
        typer.echo(ledger_view.view_json(view))
    else:
        typer.echo(ledger_view.view_screen(view, width=columns()))
