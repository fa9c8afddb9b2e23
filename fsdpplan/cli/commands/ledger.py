"""`fsdpplan ledger`: all finished runs, and how far their plans were off."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json, LedgerFile
from fsdpplan.cli.options.parse import line, path
from fsdpplan.cli.views.render import blocks, columns, listed, note, table, wrapped
from fsdpplan.errors import SpecError
from fsdpplan.files.ledger import ledger_path, read_rows, row_document
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.search.advice.words import degrees
from fsdpplan.spec.ledger import LedgerRow
from fsdpplan.units import format_percent, format_seconds
from fsdpplan.validate.compare.errors import ClusterErrors, cluster_errors

MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerViewOptions:
    """Which runs, and where they go."""

    HEADING: ClassVar[str] = "Ledger"

    ledger: LedgerFile = None
    cluster: Annotated[
        str | None,
        Flag(metavar="NAME", parse=line, help="Runs on this cluster only."),
    ] = None
    export: Annotated[
        Path | None,
        Flag(
            metavar="PATH",
            parse=path,
            help="Write the runs there, one JSON line each, without their folders.",
        ),
    ] = None


def ledger(*, options: LedgerViewOptions, json: Json = False) -> None:
    """Show finished runs and how far their plans were off."""
    found = view(options)
    if options.export is not None:
        note(export(found, options.export))
    if json:
        typer.echo(view_json(found))
    else:
        typer.echo(view_screen(found, width=columns()))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The runs that are asked for."""

    path: Path
    rows: tuple[LedgerRow, ...]
    """Oldest first."""
    unread: int
    """Rows that another fsdpplan wrote."""


def view(options: LedgerViewOptions) -> View:
    """Read them. Raises SpecError where there is no ledger, or no run in it."""
    path = ledger_path(options.ledger)
    if not os.path.exists(path):
        raise SpecError(f"there is no ledger {path} yet: fsdpplan run adds each run to it")
    rows, unread = read_rows(path, cluster=options.cluster)
    if not rows and not unread:
        where = "" if options.cluster is None else f" on {options.cluster}"
        known = sorted({row.machines.cluster for row in read_rows(path)[0]})
        names = f"; it has runs on {', '.join(known)}" if known else ""
        raise SpecError(f"the ledger {path} has no runs{where}{names}: leave --cluster out")
    return View(path=path, rows=tuple(rows), unread=unread)


def export(found: View, path: Path) -> str:
    """Write one line a run; what to say about it."""
    lines = (json.dumps(_row_document(row, with_folder=False)) + "\n" for row in found.rows)
    write_text_atomically(path, "".join(lines), advice="choose another place with --export")
    return f"wrote {len(found.rows)} runs to {path}"


class SoftwareJson(TypedDict):
    """Beside the errors of a cluster."""

    software: dict[str, int]
    """Software -> runs that tell of speed: what plans learn from."""


class ScoredJson(TypedDict):
    """Beside the fields of a run."""

    run_folder: str | None
    """Null in what --export writes."""
    versions: dict[str, str]
    cells: dict[str, str]
    """Column -> text of the row that it was learned from; empty: of no table."""
    error_fraction: float | None
    """Of the predicted step time; null: there were too few steps to compare."""
    inside_band: bool | None


class LedgerJson(TypedDict):
    """What `ledger --json` prints."""

    ledger: str
    """The file."""
    clusters: list[Annotated[dict[str, Any], ClusterErrors, SoftwareJson]]
    runs: list[Annotated[dict[str, Any], LedgerRow, ScoredJson]]
    """Oldest first."""
    unread_rows: int
    """Rows that another fsdpplan wrote."""


def view_json(found: View) -> str:
    """What `ledger --json` prints."""
    document: LedgerJson = {
        "ledger": str(found.path),
        "clusters": [
            asdict(errors) | {"software": _software(found, errors)}
            for errors in cluster_errors(found.rows)
        ],
        "runs": [_row_document(row, with_folder=True) for row in found.rows],
        "unread_rows": found.unread,
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _software(found: View, errors: ClusterErrors) -> dict[str, int]:
    """Software -> runs on a cluster that tell of speed: what plans learn from."""
    return Counter(
        row.software
        for row in found.rows
        if (row.machines.cluster, row.machines.device) == (errors.cluster, errors.device)
        and row.tells_speed
    )


def _row_document(row: LedgerRow, *, with_folder: bool) -> dict[str, Any]:
    document = row_document(row)
    document["error_fraction"] = row.error_fraction
    document["inside_band"] = row.is_covered if row.error_fraction is not None else None
    return document if with_folder else document | {"run_folder": None}


def view_screen(found: View, *, width: int) -> str:
    """The newest runs, and the errors of each cluster."""
    shown = found.rows[-MOST_SHOWN:]
    more = len(found.rows) - len(shown)
    warnings = (
        [f"{found.unread} rows were written by another fsdpplan and are not shown"]
        if found.unread
        else []
    )
    headers = ("ended (UTC)", "model", "degrees", "predicted", "measured", "error", "")
    align = ("left", "left", "left", "right", "right", "right", "left")
    return blocks(
        wrapped(f"{found.path}: {_runs(len(found.rows))}", width=width),
        table([_cells(row) for row in shown], headers=headers, align=align, width=width)
        if shown
        else "",
        f"and {more} before these" if more else "",
        *(_cluster(found, errors, width) for errors in cluster_errors(found.rows)),
        listed("Warnings", warnings, width=width),
    )


def _cells(row: LedgerRow) -> tuple[str, ...]:
    measured, error = row.observed.step_seconds, row.error_fraction
    ending = (row.observed.failure or "").replace("_", " ")
    if error is not None and not row.is_covered:
        ending = f"{ending}, outside" if ending else "outside"
    return (
        row.ended_at[:16].replace("T", " "),
        row.job.model.name,
        degrees(row.job.layout),
        format_seconds(row.predicted.step_seconds.expected),
        "unknown" if measured is None else format_seconds(measured),
        "" if error is None else f"{100 * error:+.1f} %",
        ending,
    )


def _cluster(found: View, errors: ClusterErrors, width: int) -> str:
    broken = f", {errors.failed} of them did not finish" if errors.failed else ""
    lines = [f"{_runs(errors.runs)}{broken}, {errors.compared} with enough steps to compare"]
    if errors.median_abs_error_fraction is not None:
        lines.append(
            f"predicted step time off by {format_percent(errors.median_abs_error_fraction)} "
            f"(median; nine in ten by no more than "
            f"{format_percent(errors.p90_abs_error_fraction or 0.0)}), "
            f"{100 * (errors.bias_fraction or 0.0):+.1f} % signed"
        )
        lines.append(
            f"{format_percent(errors.coverage_fraction or 0.0)} of the measured times inside the "
            "80 % band that their plans gave"
        )
    told = [f"{_runs(runs)} of {name}" for name, runs in _software(found, errors).items()]
    lines.append(f"plans learn from {', '.join(told)}" if told else "plans learn nothing of it yet")
    return listed(f"{errors.cluster}, {errors.device}", lines, width=width)


def _runs(number: int) -> str:
    return f"{number} run{'' if number == 1 else 's'}"
