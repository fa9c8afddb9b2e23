"""`fsdpplan profiles`: list and show the hardware profiles."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdpplan.cli.options import Json

Name = Annotated[
    str | None, typer.Argument(metavar="NAME|PATH", help="Show this one, with its sources.")
]


def profiles(*, name: Name = None, json: Json = False) -> None:
    """Hardware profiles: list them, or show one with its sources."""
    from fsdpplan.cli import catalogues
    from fsdpplan.cli.render import columns
    from fsdpplan.files.profiles import load_profile, profile_names

    if name is None:
        known = {known: load_profile(known) for known in profile_names()}
        text = (
            catalogues.profiles_json(known)
            if json
            else catalogues.profiles_table(known, width=columns())
        )
        typer.echo(text)
        return
    profile = load_profile(name)
    if json:
        typer.echo(catalogues.profile_json(profile))
    else:
        typer.echo(catalogues.profile_page(profile, width=columns()))
