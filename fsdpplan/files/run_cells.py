"""Cells: rows of a table of measured runs as text, to keep and to read again."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdpplan.files.runs import MeasuredRun, parse_runs, read_runs
from fsdpplan.files.table import read_text

Cells = tuple[tuple[str, str], ...]
"""(column, text) of the fields that are not empty."""

_LIMIT_BYTES = 16 * 2**20


def read_cells(path: Path) -> list[tuple[MeasuredRun, Cells]]:
    """The rows of the table at `path`, each with its cells.

    Heads that are taken from a sibling row are written down, since a cell stands for itself.
    """
    runs = read_runs(path)
    text = read_text(path, limit_bytes=_LIMIT_BYTES, what="table of runs").removeprefix("\ufeff")
    lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
    header = [name.strip() for name in lines[0]]
    return [(run, _cells(header, line, run)) for run, line in zip(runs, lines[1:], strict=True)]


def _cells(header: Sequence[str], line: Iterable[str], run: MeasuredRun) -> Cells:
    named = {name: field.strip() for name, field in zip(header, line, strict=True)}
    if run.heads is None and run.sibling_heads is not None:
        named["heads"] = str(run.sibling_heads)
    return tuple((name, text) for name, text in named.items() if text)


def run_of_cells(cells: Cells) -> MeasuredRun:
    """The row in these cells. Raises SpecError where this fsdpplan does not take them."""
    from fsdpplan.files.run_columns import REQUIRED

    named = {**dict.fromkeys(REQUIRED, ""), **dict(cells)}
    text = io.StringIO(newline="")
    csv.writer(text).writerows([list(named), list(named.values())])
    (run,) = parse_runs(text.getvalue(), where="a row of the ledger")
    return run
