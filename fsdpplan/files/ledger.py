"""The ledger: where it is, its rows as JSON and back, and the SQLite file that runs append to.

Write-ahead logging lets readers read while a run appends, and a writer that is killed leaves
nothing of its row. Where the file system has no shared memory for it, as on NFS, SQLite says so or
keeps its older journal; that costs nothing here. Source: sqlite.org, Write-Ahead Logging, sections
1 and 8.

SQLite and pydantic are imported where a ledger is read: planning without one needs neither.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpplan.errors import SpecError
from fsdpplan.files.table import kind_of_node, path_text
from fsdpplan.spec.ledger import OWN_SOFTWARE, LedgerRow

if TYPE_CHECKING:
    import sqlite3

VARIABLE = "FSDPPLAN_LEDGER"
"""Names the file."""
SCHEMA_VERSION = 2
"""1: before runs of tables. Read as it is, and upgraded by the first row that is added."""
BUSY_SECONDS = 10.0
"""How long to wait for another run's append."""

MOST_ROWS = 10_000
"""Newest rows that are read."""

_SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    ended_at TEXT NOT NULL,
    plan_sha256 TEXT NOT NULL,
    run_folder TEXT NOT NULL,
    target TEXT NOT NULL,
    cluster TEXT NOT NULL,
    device TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    model TEXT NOT NULL,
    predicted_step_seconds REAL NOT NULL,
    measured_step_seconds REAL,
    exit_code INTEGER NOT NULL,
    failure TEXT,
    versions TEXT NOT NULL,
    job TEXT NOT NULL,
    machines TEXT NOT NULL,
    predicted TEXT NOT NULL,
    observed TEXT NOT NULL,
    origin TEXT NOT NULL DEFAULT 'run',
    software TEXT NOT NULL DEFAULT 'fsdpplan',
    cells TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX runs_by_device ON runs (device);
"""
_UPGRADE = """
ALTER TABLE runs ADD COLUMN origin TEXT NOT NULL DEFAULT 'run';
ALTER TABLE runs ADD COLUMN software TEXT NOT NULL DEFAULT 'fsdpplan';
ALTER TABLE runs ADD COLUMN cells TEXT NOT NULL DEFAULT '{}';
DROP TABLE IF EXISTS learned;
"""
PARTS = ("job", "machines", "predicted", "observed")
"""Columns of JSON."""
_AS_JSON = (*PARTS, "versions", "cells")


def ledger_path(given: Path | None = None) -> Path:
    """The file that was given, or `$FSDPPLAN_LEDGER`, or `ledger.sqlite` of the user's state.

    The last follows the XDG base directory specification: `$XDG_STATE_HOME`, by default
    `~/.local/state`.
    """
    named = given or os.environ.get(VARIABLE)
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else _home() / ".local" / "state"
    return home / "fsdpplan" / "ledger.sqlite"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:  # a user without an entry in passwd, as in some containers
        raise SpecError(
            "nobody says where your home folder is, in which the ledger lies: set HOME, or give "
            "--ledger FILE or --no-ledger"
        ) from error


def append_row(path: Path, row: LedgerRow) -> None:
    """Add one run; the file and its folder are made where there are none."""
    with _written(path) as connection:
        _insert(connection, row)


def add_rows(path: Path, rows: Sequence[LedgerRow]) -> int:
    """Add those runs that are not there yet; how many that were.

    Equal runs are told by what they are and measured (`same_run`), and counted: a table in which a
    run stands twice has two, however often it is learned.
    """
    with _written(path) as connection:
        stored = (read_row(dict(one)) for one in connection.execute("SELECT * FROM runs"))
        known = Counter(same_run(row) for row in stored if row is not None)
        added = 0
        for row in rows:
            key = same_run(row)
            if known[key]:
                known[key] -= 1
                continue
            _insert(connection, row)
            added += 1
    return added


@contextmanager
def _written(path: Path) -> Iterator[sqlite3.Connection]:
    """The ledger in one transaction, made where there is none and upgraded where it is old."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"the ledger's folder {path_text(path.parent)} cannot be made: {error.strerror}; name "
            "another file with --ledger"
        ) from error
    with _opened(path) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        with _transaction(connection):
            changes = {0: _SCHEMA, 1: _UPGRADE}.get(_version(connection), "")
            for statement in filter(str.strip, changes.split(";")):
                connection.execute(statement)
            if changes:
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            _require_version(connection, path)
            yield connection


def _insert(connection: sqlite3.Connection, row: LedgerRow) -> None:
    values = row_values(row)
    names, marks = ", ".join(values), ", ".join("?" for _ in values)
    connection.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", tuple(values.values()))


def read_rows(
    path: Path, *, cluster: str | None = None, device: str | None = None
) -> tuple[list[LedgerRow], int]:
    """(runs, oldest first; how many could not be read): all, or those of a cluster or a device."""
    with _reading(path) as connection:
        found = connection.execute(
            "SELECT * FROM runs WHERE cluster = coalesce(?, cluster) AND device = "
            f"coalesce(?, device) ORDER BY id DESC LIMIT {MOST_ROWS}",
            (cluster, device),
        ).fetchall()
    rows = [read_row(dict(one)) for one in reversed(found)]
    known = [row for row in rows if row is not None]
    return known, len(rows) - len(known)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    with _opened(path, mode="rw") as connection:
        if _version(connection) == 0:
            raise SpecError(f"{path_text(path)} is no ledger of fsdpplan; {_ADVICE}")
        _require_version(connection, path)
        yield connection


_ADVICE = "name another file with --ledger, or leave it out by --no-ledger"


@contextmanager
def _opened(path: Path, *, mode: str = "rwc") -> Iterator[sqlite3.Connection]:
    import sqlite3

    try:
        # SQLite would wait for a pipe, and lay its journal beside a device.
        if os.path.exists(path) and not stat.S_ISREG(kind := os.stat(path).st_mode):
            raise SpecError(
                f"the ledger {path_text(path)} is not a file, but {kind_of_node(kind)}; {_ADVICE}"
            )
        address = f"{path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        with closing(connection):
            connection.row_factory = sqlite3.Row
            connection.text_factory = _text
            yield connection
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(
            f"the ledger {path_text(path)} cannot be used: {reason}; {_ADVICE}"
        ) from error


def _text(data: bytes) -> str:
    """Damaged text is text that no reader of a row knows, and ends no reading."""
    return data.decode("utf-8", errors="replace")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing; the write lock is taken at once, so that no two writers meet."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _require_version(connection: sqlite3.Connection, path: Path) -> None:
    version = _version(connection)
    if not 1 <= version <= SCHEMA_VERSION:
        raise SpecError(
            f"the ledger {path_text(path)} has schema version {version}, and this fsdpplan reads "
            f"{SCHEMA_VERSION}: update fsdpplan, or {_ADVICE}"
        )


def row_values(row: LedgerRow) -> dict[str, str | float | None]:
    """Column -> value. What is asked for most has columns of its own, for whoever reads by SQL."""
    parts = {part: json.dumps(asdict(getattr(row, part)), allow_nan=False) for part in PARTS}
    return {
        "ended_at": row.ended_at,
        "plan_sha256": row.plan_sha256,
        "run_folder": row.run_folder,
        "target": row.target,
        "cluster": row.machines.cluster,
        "device": row.machines.device,
        "gpus": row.machines.gpus,
        "model": row.job.model.name,
        "predicted_step_seconds": row.predicted.step_seconds.expected,
        "measured_step_seconds": row.observed.step_seconds,
        "exit_code": row.observed.exit_code,
        "failure": row.observed.failure,
        "versions": json.dumps(dict(row.versions)),
        "origin": row.origin,
        "software": row.software,
        "cells": json.dumps(dict(row.cells)),
        **parts,
    }


def same_run(row: LedgerRow) -> str:
    """Equal for one run, however it came: by `run`, from its folder, from a table or an export."""
    if row.cells:
        return json.dumps(dict(row.cells), sort_keys=True)
    return json.dumps([row.plan_sha256, asdict(row.observed)], sort_keys=True)


def row_document(row: LedgerRow) -> dict[str, Any]:
    """The row as JSON has it."""
    return asdict(row) | {"versions": dict(row.versions), "cells": dict(row.cells)}


def row_of_document(document: dict[str, Any]) -> LedgerRow | None:
    """The row in a line that `ledger --export` wrote; None where this fsdpplan does not know it."""
    values = {name: json.dumps(value) for name, value in document.items() if name in _AS_JSON}
    return read_row({**document, **values, "run_folder": document.get("run_folder") or ""})


def read_row(values: dict[str, Any]) -> LedgerRow | None:
    """The row in these columns; None where another fsdpplan wrote what this one does not know."""
    from fsdpplan.files.documents import validate_ledger

    try:
        texts = {name: json.loads(values[name]) for name in (*PARTS, "versions")}
        document = validate_ledger(texts)
        cells = _cells(json.loads(values.get("cells") or "{}"))
    except (SpecError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return LedgerRow(
        ended_at=str(values.get("ended_at", "")),
        plan_sha256=str(values.get("plan_sha256", "")),
        run_folder=str(values.get("run_folder", "")),
        target=str(values.get("target", "")),
        job=document.job,
        machines=document.machines,
        predicted=document.predicted,
        observed=document.observed,
        versions=tuple(document.versions.items()),
        origin=str(values.get("origin") or "run"),
        software=str(values.get("software") or OWN_SOFTWARE),
        cells=cells,
    )


def _cells(found: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, dict):
        raise SpecError("cells must be a table of columns")
    return tuple((str(name), str(text)) for name, text in found.items())
