"""`fsdpplan learn`: take measured runs into the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.question import Json, LedgerFile

Places = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE...",
        help="Tables of measured runs (docs/reference/runs.md), folders of runs, what fsdpplan "
        "ledger --export wrote, other ledgers.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """Where they are kept."""

    HEADING: ClassVar[str] = "Ledger"

    ledger: LedgerFile = None


def learn(*, places: Places, options: LearnOptions, json: Json = False) -> None:
    """Take measured runs into the ledger, for plans to learn from.

    A run that is there already is not added again.
    """
    from fsdpplan.cli.views import learning
    from fsdpplan.cli.views.render import columns

    taken = learning.taken([Path(place) for place in places], options.ledger)
    typer.echo(learning.as_json(taken) if json else learning.screen(taken, width=columns()))
