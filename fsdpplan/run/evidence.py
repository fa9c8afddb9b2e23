"""Evidence: measured runs from wherever they lie: tables, run folders, exports, ledgers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.job_records import read_record
from fsdpplan.files.ledger import read_rows, row_of_document
from fsdpplan.files.runs.table import read_cells, read_runs
from fsdpplan.files.table import beside, parse_json_object, path_text, read_text
from fsdpplan.run.follow.jobs import RUNS_FOLDER
from fsdpplan.run.launch import FILE_NAMES
from fsdpplan.run.ledger import finished_row
from fsdpplan.run.verify import finished_run
from fsdpplan.spec.ledger import LedgerRow
from fsdpplan.validate.learn.evidence import MeasuredRow
from fsdpplan.validate.learn.imported import imported
from fsdpplan.validate.runs.skipped import Skipped

LIMIT_BYTES = 64 * 2**20
_SQLITE = b"SQLite format 3\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A run that is not learned from."""

    where: str
    why: str


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What one place holds."""

    rows: list[LedgerRow] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def rows_at(path: Path) -> list[MeasuredRow]:
    """All runs at `path`, to learn from now: rows of a table stay what the table says."""
    return list(read_runs(path)) if _is_table(path) else [*evidence_at(path).rows]


MEASURED_HERE = "steps.csv"
"""Table in the folder that `tests/gpu/session.sh` leaves."""


def evidence_at(path: Path) -> Evidence:
    """All runs at `path` as rows of the ledger, to keep. Raises SpecError where there are none."""
    if not os.path.exists(path):
        raise SpecError(
            f"{path_text(path)} does not exist{beside(path)}: name a table of measured "
            "runs, a run's folder, or what fsdpplan ledger --export wrote"
        )
    if os.path.isdir(path):
        return _table(path / MEASURED_HERE) if (path / MEASURED_HERE).is_file() else _folders(path)
    if _is_ledger(path):
        rows, unread = read_rows(path)
        why = f"{unread} rows were written by another fsdpplan"
        return Evidence(rows=rows, refused=[Refused(where=path.name, why=why)] if unread else [])
    return _lines(path) if path.suffix in (".jsonl", ".json") else _table(path)


def _is_table(path: Path) -> bool:
    return os.path.isfile(path) and path.suffix not in (".jsonl", ".json") and not _is_ledger(path)


def _is_ledger(path: Path) -> bool:
    if not os.path.isfile(path):  # a pipe would keep us waiting
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def _table(path: Path) -> Evidence:
    found = Evidence()
    for run, cells in read_cells(path):
        row = imported(run, cells, origin=path.name)
        if isinstance(row, Skipped):
            found.refused.append(Refused(where=f"{path.name} row {run.row}", why=row.sentence))
        else:
            found.rows.append(row)
    return found


def _lines(path: Path) -> Evidence:
    """A file with a JSON object a line, as `ledger --export` writes it."""
    found = Evidence()
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="export of a ledger")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path_text(path)} line {number}"
        row = row_of_document(parse_json_object(line, where=where))
        if row is None:
            found.refused.append(Refused(where=where, why="it is no run that this fsdpplan knows"))
        else:
            found.rows.append(row)
    return found


def _folders(path: Path) -> Evidence:
    """One run's folder, a folder of such, or one that runs were started in."""
    found = Evidence()
    folders = list(_run_folders(path))
    if not folders:
        raise SpecError(
            f"{path_text(path)} holds no run: name the folder of a run in {RUNS_FOLDER}, or a "
            "table of measured runs"
        )
    for folder in folders:
        try:
            started_in = _started_in(folder)
            run = finished_run(folder, plan_file=None, folder=started_in)
            record = read_record(folder)
            ending = None if record is None else record.ending
            found.rows.append(
                finished_row(run, folder=folder, exit_code=ending.exit_code if ending else 0)
            )
        except SpecError as error:
            found.refused.append(Refused(where=folder.name, why=str(error)))
    return found


def _run_folders(path: Path) -> Iterator[Path]:
    if any((path / name).is_file() for name in FILE_NAMES) and path.parent.name == RUNS_FOLDER:
        yield path
        return
    inside = path / RUNS_FOLDER if (path / RUNS_FOLDER).is_dir() else path
    for folder in sorted(inside.glob("*")):
        if any((folder / name).is_file() for name in FILE_NAMES):
            yield folder


def _started_in(folder: Path) -> Path:
    """Where a run was started: paths of its script start there."""
    return folder.resolve().parent.parent
