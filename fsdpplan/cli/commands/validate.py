"""`fsdpplan validate`: predict a table of measured runs, and say how far off it is."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import path
from fsdpplan.cli.views.render import blocks, columns, listed, table, wrapped
from fsdpplan.cli.views.validation import report_json, report_screen
from fsdpplan.errors import SpecError
from fsdpplan.files.runs.table import bundled_runs, read_runs
from fsdpplan.run.evidence import rows_at
from fsdpplan.validate.compare.kernel_scores import (
    KernelReport,
    ScoredKernel,
    collective_report,
    matmul_report,
)
from fsdpplan.validate.compare.report import Report, report
from fsdpplan.validate.learn.evidence import told
from fsdpplan.validate.learn.peaks import told_peaks
from fsdpplan.validate.learn.validated import (
    LearnedReport,
    after_learning,
    learned_report,
    left_one_out,
)

Runs = Annotated[
    str | None,
    typer.Argument(
        metavar="RUNS.csv",
        help="A table of measured runs (docs/reference/runs.md); without, the published runs that "
        "come with the repository.",
        show_default=False,
    ),
]

Collectives = Annotated[
    str | None,
    typer.Option(
        "--collectives",
        metavar="TABLE",
        help="A table of timed collectives instead, as CSV (docs/reference/kernel-tables.md) or as "
        "nccl-tests printed it: errors by GPU, fabric and span.",
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

KERNELS = {"matmul": "matmuls", "collective": "collectives"}


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


Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="List all that is to be seen to in RUNS.csv before others use it: code 2 where it "
        "cannot be read, 6 where something is left.",
    ),
]


def validate(
    *,
    table: Runs = None,
    collectives: Collectives = None,
    matmuls: Matmuls = None,
    options: ValidateOptions,
    check: Check = False,
    json: Json = False,
) -> None:
    """Predict a table of measured runs, and report the errors."""
    if check:
        if collectives or matmuls or options.runs or options.leave_one_out or table is None:
            raise SpecError(
                "--check is of one table of runs: type fsdpplan validate my_runs.csv --check"
            )
        _check(table, as_json=json)
        return
    if collectives is not None or matmuls is not None:
        learns = options.runs is not None or options.leave_one_out
        _kernels(table, collectives, matmuls, learns=bool(learns), as_json=json)
        return
    result = report(read_runs(bundled_runs() if table is None else Path(table)))
    after = learned(result, options.runs, leave_one_out=bool(options.leave_one_out))
    if json:
        typer.echo(report_json(result, after))
    else:
        typer.echo(report_screen(result, after, width=columns()))


def _check(table: str, *, as_json: bool) -> None:
    """One table of the user's: its form, then rows that cannot be predicted, or lie far off."""
    from fsdpplan.cli.views.findings import conclude  # only where it is asked for
    from fsdpplan.files.runs.check import check_runs
    from fsdpplan.validate.compare.doubts import doubts

    checked = check_runs(Path(table))
    found = [*checked.findings, *(doubts(Path(table)) if checked.is_readable else ())]
    conclude(
        table,
        found,
        counts={"rows": checked.rows},
        after=f"next: fsdpplan validate {shlex.quote(table)} says how far off each source is",
        as_json=as_json,
    )


def learned(report: Report, runs: Path | None, *, leave_one_out: bool) -> LearnedReport | None:
    """The same table after learning from `runs`, or from its other rows; None: from nothing."""
    if runs is None and not leave_one_out:
        return None
    if runs is not None and leave_one_out:
        raise SpecError("--runs and --leave-one-out are two things to learn from: give one of them")
    if runs is None:
        return learned_report(left_one_out(report.rows))
    known = rows_at(runs)
    if not told(known) and not told_peaks(known):
        raise SpecError(
            f"no run in {runs} has a step time or a peak of memory that can be compared: type "
            f"fsdpplan validate {runs} to see why"
        )
    return learned_report(after_learning(report.rows, known))


def _kernels(
    runs: str | None,
    collectives: str | None,
    matmuls: str | None,
    *,
    learns: bool,
    as_json: bool,
) -> None:
    """The tables of kernels, each by itself."""
    if runs is not None:
        raise SpecError(
            f"a table of runs and one of kernels are scored apart: fsdpplan validate {runs}, and "
            "then --collectives or --matmuls without it"
        )
    if learns:
        raise SpecError(
            "kernels are not learned from runs: use --runs and --leave-one-out with a table of "
            "runs, without --collectives and --matmuls"
        )
    reports = []
    if collectives is not None:
        reports.append(collective_report(Path(collectives)))
    if matmuls is not None:
        reports.append(matmul_report(Path(matmuls)))
    typer.echo(kernels_json(reports) if as_json else kernels_screen(reports, width=columns()))


def kernels_screen(reports: Sequence[KernelReport], *, width: int) -> str:
    """Errors by group of each table, and what was skipped and why."""
    return blocks(*(_kernels_block(report, width) for report in reports))


def _kernels_block(report: KernelReport, width: int) -> str:
    predicted = sum(row.predicted_seconds is not None for row in report.rows)
    counted = sum(group.rows for group in report.groups)
    head = f"{len(report.rows):,} timed {KERNELS[report.kind]}, {predicted:,} predicted"
    if counted < predicted:
        head += f", {counted:,} of a MiB or more"
    rows = [
        (
            *group.group,
            str(group.rows),
            f"{group.median_abs_error_fraction:.1%}",
            f"{group.p90_abs_error_fraction:.1%}",
            f"{group.bias_fraction:+.1%}",
        )
        for group in report.groups
    ]
    headers = (*report.group_names, "rows", "median", "p90", "bias")
    align = (*["left"] * len(report.group_names), *["right"] * 4)
    skipped = Counter(row.skipped.reason for row in report.rows if row.skipped is not None)
    return blocks(
        wrapped(head, width=width),
        table(rows, headers=headers, align=align, width=width),
        listed(
            "Not predicted",
            [f"{reason} ({count})" for reason, count in skipped.most_common()],
            width=width,
        ),
    )


class KernelJson(TypedDict):
    """One row of a table of kernels."""

    row: int
    status: Literal["predicted", "skipped"]
    reason: str | None
    measured_seconds: float | None
    predicted_seconds: float | None
    error_fraction: float | None
    counts: bool
    """The errors are over it."""


class KernelsJson(TypedDict):
    """A table of kernels."""

    rows: list[KernelJson]
    groups: list[dict[str, Any]]
    """The errors of each group, beside what it is of, by column."""


class ValidateKernelsJson(TypedDict, total=False):
    """What `validate --collectives --matmuls --json` prints: what was asked for."""

    matmuls: KernelsJson
    collectives: KernelsJson


def kernels_json(reports: Sequence[KernelReport]) -> str:
    """Each table under its kind: its rows, and the errors of its groups."""
    return json.dumps({KERNELS[one.kind]: _kernels_document(one) for one in reports}, indent=2)


def _kernels_document(report: KernelReport) -> KernelsJson:
    return {
        "rows": [_kernel_document(row) for row in report.rows],
        "groups": [
            {
                **dict(zip(report.group_names, group.group, strict=True)),
                **{key: value for key, value in asdict(group).items() if key != "group"},
            }
            for group in report.groups
        ],
    }


def _kernel_document(row: ScoredKernel) -> KernelJson:
    return {
        "row": row.row,
        "status": "predicted" if row.skipped is None else "skipped",
        "reason": None if row.skipped is None else row.skipped.sentence,
        "measured_seconds": row.measured_seconds,
        "predicted_seconds": row.predicted_seconds,
        "error_fraction": row.error_fraction,
        "counts": row.counts,
    }
