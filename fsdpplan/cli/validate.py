"""`fsdpplan validate`: predict a table of measured runs, and say how far off it is."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdpplan.cli.options import Json
from fsdpplan.errors import SpecError

Runs = Annotated[
    str | None,
    typer.Argument(
        metavar="RUNS.csv",
        help="A table of measured runs: docs/reference/runs.md.",
        show_default=False,
    ),
]


def validate(*, runs: Runs = None, json: Json = False) -> None:
    """Predict a table of measured runs, and report the errors."""
    from pathlib import Path

    from fsdpplan.cli import validation
    from fsdpplan.cli.render import columns
    from fsdpplan.files.runs import read_runs
    from fsdpplan.validate.report import report

    if runs is None:
        raise SpecError(
            "validate needs a table of measured runs, as none comes with fsdpplan yet; type "
            "`fsdpplan validate RUNS.csv`, with the columns of docs/reference/runs.md"
        )
    result = report(read_runs(Path(runs)))
    typer.echo(
        validation.report_json(result) if json else validation.screen(result, width=columns())
    )
