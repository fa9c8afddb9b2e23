"""`fsdpplan status`: how the runs of this folder stand."""

from __future__ import annotations

import typer

from fsdpplan.cli.options.question import Json
from fsdpplan.cli.views.told import tell


def status(*, json: Json = False) -> None:
    """Show how the runs of this folder stand."""
    from fsdpplan.cli.views import standing
    from fsdpplan.cli.views.render import columns

    found = standing.standings()
    for text in standing.unreadable():
        tell(f"warning: {text}")
    typer.echo(standing.standings_json(found) if json else standing.screen(found, width=columns()))
