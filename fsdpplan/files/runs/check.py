"""All that is to be seen to in a table of measured runs at once, where its reader stops at the
first fault: what it refuses, and what somebody else needs to look a row up and to compare it.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.columns import COLUMNS, REQUIRED, cell_value
from fsdpplan.files.runs.table import LIMIT_BYTES, MAX_ROWS
from fsdpplan.files.table import Finding, path_text, read_text, short

LOOKED_UP = ("source_url", "date", "framework")
"""Columns without which nobody can look a row up, or know which software ran."""
MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib", "oom")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRuns:
    """A table that was looked at."""

    rows: int
    findings: tuple[Finding, ...]

    @property
    def is_readable(self) -> bool:
        """Whether its rows can be predicted."""
        return not any(one.kind in ("wrong", "missing") for one in self.findings)


def check_runs(path: Path) -> CheckedRuns:
    """All that is to be seen to in the table at `path`. Raises SpecError where it is no CSV."""
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="table of runs")
    return check_text(text, where=path_text(path))


def check_text(text: str, *, where: str) -> CheckedRuns:
    """The same of the text of a table."""
    lines = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        kept = [fields for fields in lines if fields]
    except csv.Error as error:
        raise SpecError(
            f"{where} is not CSV at line {lines.line_num}: {error}; quote fields that hold commas "
            "or quotes"
        ) from error
    if not kept:
        raise SpecError(f"{where} is empty; add a header, and one row a run")
    if len(kept) > MAX_ROWS:
        raise SpecError(f"{where} has more than {MAX_ROWS:,} rows; split it into several tables")
    header = [field.strip() for field in kept[0]]
    found = list(_header(header))
    for row, fields in enumerate(kept[1:]):
        found += _row(f"row {row}", header, fields)
    if len(kept) == 1:
        found.append(Finding(kind="missing", where="rows", what="add one row a run"))
    return CheckedRuns(rows=len(kept) - 1, findings=tuple(found))


def _header(header: list[str]) -> Iterator[Finding]:
    for name in dict.fromkeys(header):
        if name not in COLUMNS:
            near = difflib.get_close_matches(name[:40], COLUMNS, n=1)
            meant = f"write {near[0]}" if near else "remove it"
            what = f"{short(name)} is no column: {meant}"
            yield Finding(kind="wrong", where="header", what=what)
        elif header.count(name) > 1:
            yield Finding(kind="wrong", where="header", what=f"{name} stands twice: keep one")
    for name in REQUIRED:
        if name not in header:
            what = f"add the column {name}; its fields may be empty"
            yield Finding(kind="missing", where="header", what=what)
    for name in LOOKED_UP:
        if name not in header:
            yield Finding(kind="unsourced", where="header", what=f"add the column {name}")


def _row(place: str, header: list[str], fields: list[str]) -> Iterator[Finding]:
    if len(fields) != len(header):
        what = f"has {len(fields)} fields, the header {len(header)}: give one a column"
        yield Finding(kind="wrong", where=place, what=what)
        return
    cells = {name: field.strip() for name, field in zip(header, fields, strict=True)}
    for name, text in cells.items():
        if name in COLUMNS:
            try:
                cell_value(name, text, place)
            except SpecError as error:
                what = str(error).partition(": ")[2]
                yield Finding(kind="wrong", where=f"{place}, {name}", what=what)
    for name in LOOKED_UP:
        if name in cells and not cells[name]:
            yield Finding(kind="unsourced", where=f"{place}, {name}", what="is empty: fill it")
    yield from _measured(place, cells)


def _measured(place: str, cells: Mapping[str, str]) -> Iterator[Finding]:
    """What a row says of speed and memory, and whether that can be compared."""
    if not any(cells.get(name) for name in MEASURED):
        what = f"nothing is measured: fill one of {', '.join(MEASURED)}"
        yield Finding(kind="unsourced", where=place, what=what)
    if cells.get("peak_mem_gib") and not re.search(r"\bmem_kind=[\w-]+", cells.get("notes", "")):
        what = "say in notes which memory it is: mem_kind=alloc, =reserved or =nvidia-smi"
        yield Finding(kind="unsourced", where=f"{place}, peak_mem_gib", what=what)
    for name in ("mfu", "hfu"):
        share = _value(cells, name)
        if share is not None and share > 1:
            what = f"{share:g} is above 1: write a share, {share / 100:g} for {share:g} %"
            yield Finding(kind="implausible", where=f"{place}, {name}", what=what)
    whole, micro = _value(cells, "global_batch"), _value(cells, "micro_batch")
    if whole is not None and micro is not None and whole < micro:
        what = f"{whole:g} sequences a step are fewer than one micro-batch of {micro:g}"
        yield Finding(kind="implausible", where=f"{place}, global_batch", what=what)


def _value(cells: Mapping[str, str], name: str) -> float | None:
    try:
        return float(cells.get(name) or "")
    except ValueError:
        return None
