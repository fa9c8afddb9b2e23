"""`fsdpplan profiles`: list, search and show the hardware profiles."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdpplan.cli.options.files import Json
from fsdpplan.cli.views.profiles import (
    profile_json,
    profile_kind,
    profile_page,
    profiles_json,
    profiles_table,
)
from fsdpplan.cli.views.render import columns
from fsdpplan.files.profiles.search import find_entries

# hidden: the list of arguments would show its Python type, so the command's text says what it is
Words = Annotated[list[str] | None, typer.Argument(metavar="NAME|PATH|WORD", hidden=True)]
Kind = Annotated[
    str | None,
    typer.Option(
        "--kind", metavar="device|node|cluster", help="List these only.", show_default=False
    ),
]


def profiles(*, words: Words = None, kind: Kind = None, json: Json = False) -> None:
    """Hardware profiles: list or search them, or show one.

    A NAME or PATH shows that profile. WORDS list those that have them all in their name, their
    description or their device, and show it where there is only one.
    """
    width = columns()
    found = find_entries(words or (), profile_kind(kind))
    if not words or len(found) > 1:
        text = profiles_json(found) if json else profiles_table(found, width=width)
    elif json:
        text = profile_json(found[0])
    else:
        text = profile_page(found[0], width=width)
    typer.echo(text)
