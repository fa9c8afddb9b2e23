"""`fsdpplan learn`: take measured runs into the ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

import typer

from fsdpplan.cli.options.files import Json, LedgerFile
from fsdpplan.cli.views.render import blocks, columns, listed, wrapped
from fsdpplan.errors import SpecError
from fsdpplan.files.ledger import add_rows, ledger_path
from fsdpplan.run.evidence import Refused, evidence_at
from fsdpplan.spec.ledger import LedgerRow

MOST_REFUSED = 12
"""Sentences on the screen; JSON has all of them."""

Places = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE",
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
    if not places:  # one that was not typed arrives as None
        raise SpecError("learn takes measured runs: type fsdpplan learn my_runs.csv")
    found = taken([Path(place) for place in places], options.ledger)
    typer.echo(taken_json(found) if json else taken_screen(found, width=columns()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What became of the runs."""

    ledger: Path
    rows: tuple[LedgerRow, ...]
    """All that can be learned from, new or not."""
    added: int
    refused: tuple[Refused, ...]


def taken(places: Sequence[Path], ledger: Path | None) -> Taken:
    """Read them, and add those that are new. Raises SpecError where nothing can be learned."""
    found = [evidence_at(place) for place in places]
    rows = tuple(row for one in found for row in one.rows)
    refused = tuple(one for evidence in found for one in evidence.refused)
    if not rows:
        why = refused[0].why if refused else "it is empty"
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise SpecError(
            f"nothing to learn from {', '.join(map(str, places))}: {why}{more}; "
            "give it what a row needs (docs/reference/runs.md)"
        )
    file = ledger_path(ledger)
    return Taken(ledger=file, rows=rows, added=add_rows(file, rows), refused=refused)


class StackJson(TypedDict):
    """How many runs are of one software, number format and device."""

    software: str
    precision: str
    device: str
    runs: int


class LearnJson(TypedDict):
    """What `learn --json` prints."""

    ledger: str
    """The file."""
    runs: int
    added: int
    known_before: int
    stacks: list[StackJson]
    refused: list[Annotated[dict[str, Any], Refused]]


def taken_json(found: Taken) -> str:
    """What `learn --json` prints."""
    document: LearnJson = {
        "ledger": str(found.ledger),
        "runs": len(found.rows),
        "added": found.added,
        "known_before": len(found.rows) - found.added,
        "stacks": [
            {"software": software, "precision": precision, "device": device, "runs": runs}
            for (software, precision, device), runs in _stacks(found.rows).items()
        ],
        "refused": [asdict(one) for one in found.refused],
    }
    return json.dumps(document, indent=2)


def taken_screen(found: Taken, *, width: int) -> str:
    """How many were added, of which stacks, and which were not, and why."""
    before = len(found.rows) - found.added
    known = f", {before} known before" if before else ""
    stacks = [
        f"{software} on {device} in {precision}: {runs}"
        for (software, precision, device), runs in _stacks(found.rows).items()
    ]
    refused = [f"{one.where}: {one.why}" for one in found.refused]
    more = len(refused) - MOST_REFUSED
    shown = [*refused[:MOST_REFUSED], f"{more} more, with --json"] if more > 0 else refused
    return blocks(
        wrapped(f"{found.added} runs added to {found.ledger}{known}", width=width),
        listed("Runs by software, GPU and number format", stacks, width=width),
        listed("Not learned from", shown, width=width),
    )


def _stacks(rows: Sequence[LedgerRow]) -> Counter[tuple[str, str, str]]:
    return Counter((row.software, row.job.training.precision, row.machines.device) for row in rows)
