"""`fsdpplan validate`: predict a table of measured runs, and say how far off it is."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdpplan.cli.options import Json

Runs = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUNS.csv]",
        help="A table of measured runs (docs/reference/runs.md); without, the published runs that "
        "come with the repository.",
        show_default=False,
    ),
]


def validate(*, runs: Runs = None, json: Json = False) -> None:
    """Predict a table of measured runs, and report the errors."""
    from pathlib import Path

    from fsdpplan.cli import validation, validation_json
    from fsdpplan.cli.render import columns
    from fsdpplan.files.bundled import bundled_runs
    from fsdpplan.files.runs import read_runs
    from fsdpplan.validate.report import report

    result = report(read_runs(bundled_runs() if runs is None else Path(runs)))
    typer.echo(
        validation_json.report_json(result) if json else validation.screen(result, width=columns())
    )
