"""`fsdpplan profiles`: list, search and show the hardware profiles."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fsdpplan.cli.options import offered
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.views.profiles import (
    profile_json,
    profile_kind,
    profile_page,
    profiles_json,
    profiles_table,
)
from fsdpplan.cli.views.render import columns
from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.search import Entry, find_entries

# hidden: the list of arguments would show its Python type, so the command's text says what it is
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME|PATH|WORD", hidden=True, autocompletion=offered.profiles),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="device|node|cluster",
        help="List these only.",
        show_default=False,
        autocompletion=offered.one_of(("device", "node", "cluster")),
    ),
]


Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="List all that is to be seen to in the profile at PATH: code 2 where it cannot be "
        "read, 6 where a source or a number is doubtful.",
    ),
]

Toml = Annotated[
    bool,
    typer.Option(
        "--toml", help="Print the file of one profile: what a profile of yours begins as."
    ),
]


def profiles(
    *,
    words: Words = None,
    kind: Kind = None,
    check: Check = False,
    toml: Toml = False,
    json: Json = False,
) -> None:
    """Hardware profiles: list or search them, or show one.

    A NAME or PATH shows that profile. WORDS list those that have them all in their name, their
    description or their device, and show it where there is only one.
    """
    if check:
        _check(words or [], as_json=json)
        return
    found = find_entries(words or (), profile_kind(kind))
    if toml:
        typer.echo(_file_of_one(found, as_json=json), nl=False)
        return
    width = columns()
    if not words or len(found) > 1:
        text = profiles_json(found) if json else profiles_table(found, width=width)
    elif json:
        text = profile_json(found[0])
    else:
        text = profile_page(found[0], width=width)
    typer.echo(text)


def _file_of_one(found: Sequence[Entry], *, as_json: bool) -> str:
    if as_json:
        raise SpecError("--toml prints a file as it stands: leave out --json")
    if len(found) > 1:
        raise SpecError(
            f"--toml prints one file, and {len(found)} profiles were found: name one, such as "
            f"{found[0].name}"
        )
    return found[0].text


def _check(words: list[str], *, as_json: bool) -> None:
    """One file of the user's."""
    from fsdpplan.cli.views.findings import conclude  # only where it is asked for
    from fsdpplan.files.profiles.check import check_profile

    if len(words) != 1:
        raise SpecError("--check is of one file: type fsdpplan profiles --check my-node.toml")
    found = check_profile(Path(words[0]))
    conclude(
        words[0],
        found.findings,
        counts={"numbers": found.numbers},
        after=f"next: fsdpplan profiles {shlex.quote(words[0])} shows what the model makes of it",
        as_json=as_json,
    )
