"""The files that commands read and write: plans, the ledger, measured runs; and --json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import line, path
from fsdpplan.errors import SpecError
from fsdpplan.files.table import path_text

DEFAULT_PLAN = "fsdpplan.json"
"""Where `recommend` saves and the other commands look."""

PlanFile = Annotated[
    str,
    typer.Argument(
        metavar="PLAN", help="A saved plan. Default: fsdpplan.json.", show_default=False
    ),
]

PlanNamed = Annotated[
    str | None,
    Flag(
        name="--plan", metavar="PLAN", parse=line, help="The saved plan, another way to type PLAN."
    ),
]


def plan_place(argument: str, option: str | None) -> str:
    """The plan that was named, in either way."""
    if argument and option and argument != option:
        raise SpecError(
            f"PLAN is {path_text(argument)} and --plan {path_text(option)}: leave one of them out"
        )
    return option or argument or DEFAULT_PLAN


Save = Annotated[
    str,
    typer.Option(
        "--save",
        metavar="PATH",
        help="Where to save the plan. Default: fsdpplan.json.",
        show_default=False,
    ),
]

NoSave = Annotated[bool, typer.Option("--no-save", help="Save no plan.")]

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, nothing else.")]

LedgerFile = Annotated[
    Path | None,
    Flag(
        metavar="FILE",
        parse=path,
        help="Default: $FSDPPLAN_LEDGER, else ~/.local/state/fsdpplan/ledger.sqlite.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """What is remembered of finished runs."""

    HEADING: ClassVar[str] = "Ledger (finished runs)"

    ledger: LedgerFile = None
    no_ledger: Annotated[
        bool | None, Flag(name="--no-ledger", help="Neither learn from past runs nor add one.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceOptions(LedgerOptions):
    """Measured runs that a prediction learns from."""

    HEADING: ClassVar[str] = "Measured runs to learn from"

    runs: Annotated[
        Path | None,
        Flag(
            metavar="FILE",
            parse=path,
            help="Measured runs (a table, see docs/reference/runs.md, a run's folder or an "
            "export) to learn from beside the ledger; they are not kept.",
        ),
    ] = None
    software: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            parse=line,
            help="Framework that will train, by its name in those runs. Default: the commonest of "
            "this --runtime.",
        ),
    ] = None
