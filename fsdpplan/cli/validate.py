"""`fsdpplan validate`: predict a table of measured runs, and say how far off it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.expand import Flag
from fsdpplan.cli.options import Json
from fsdpplan.cli.parse import path

Runs = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUNS.csv]",
        help="A table of measured runs (docs/reference/runs.md); without, the published runs that "
        "come with the repository.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """What to learn from before."""

    HEADING: ClassVar[str] = "Learn first"

    runs: Annotated[
        Path | None,
        Flag(
            metavar="FILE",
            parse=path,
            help="Learn from these measured runs (a table, a run's folder, an export, a ledger), "
            "then predict.",
        ),
    ] = None
    leave_one_out: Annotated[
        bool | None,
        Flag(help="Predict each row after learning from all others of the table."),
    ] = None


def validate(*, table: Runs = None, options: ValidateOptions, json: Json = False) -> None:
    """Predict a table of measured runs, and report the errors."""
    from fsdpplan.cli import validation, validation_json
    from fsdpplan.cli.render import columns
    from fsdpplan.files.bundled import bundled_runs
    from fsdpplan.files.runs import read_runs
    from fsdpplan.validate.report import report

    result = report(read_runs(bundled_runs() if table is None else Path(table)))
    learned = validation.learned(result, options.runs, leave_one_out=bool(options.leave_one_out))
    if json:
        typer.echo(validation_json.report_json(result, learned))
    else:
        typer.echo(validation.screen(result, learned, width=columns()))
