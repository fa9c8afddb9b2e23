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

Collectives = Annotated[
    str | None,
    typer.Option(
        "--collectives",
        metavar="TABLE.csv",
        help="A table of timed collectives instead (docs/reference/kernel-tables.md): errors by "
        "GPU, fabric and span.",
    ),
]
Matmuls = Annotated[
    str | None,
    typer.Option(
        "--matmuls",
        metavar="TABLE.csv",
        help="A table of timed matmuls instead (docs/reference/kernel-tables.md): errors by GPU, "
        "format and size.",
    ),
]


def validate(
    *,
    runs: Runs = None,
    collectives: Collectives = None,
    matmuls: Matmuls = None,
    json: Json = False,
) -> None:
    """Predict a table of measured runs, and report the errors."""
    if collectives is not None or matmuls is not None:
        _kernels(runs, collectives, matmuls, as_json=json)
        return
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


def _kernels(
    runs: str | None, collectives: str | None, matmuls: str | None, *, as_json: bool
) -> None:
    """The tables of kernels, each by itself."""
    from pathlib import Path

    from fsdpplan.cli.kernel_view import kernels_json, kernels_screen
    from fsdpplan.cli.render import columns
    from fsdpplan.errors import SpecError
    from fsdpplan.validate.kernel_scores import collective_report, matmul_report

    if runs is not None:
        raise SpecError(
            f"a table of runs and one of kernels are scored apart: fsdpplan validate {runs}, and "
            "then --collectives or --matmuls without it"
        )
    reports = []
    if collectives is not None:
        reports.append(collective_report(Path(collectives)))
    if matmuls is not None:
        reports.append(matmul_report(Path(matmuls)))
    typer.echo(kernels_json(reports) if as_json else kernels_screen(reports, width=columns()))
