"""The ledger keeps what runs tell it, whoever is killed meanwhile."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.ledger import (
    SCHEMA_VERSION,
    add_rows,
    append_row,
    ledger_path,
    read_rows,
    row_document,
    row_of_document,
)
from tests.ledgers import cluster_of, jobs, row_of

(JOB, GPUS), *_ = jobs()
DEVICE = cluster_of(GPUS).device.name
ROW = row_of(JOB, cluster_of(GPUS), 1.5)
ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "recordings" / "ledger_before_tables.sqlite"

WRITER = """
import sys
from pathlib import Path
from fsdpplan.files.ledger import append_row
from tests.files.test_ledger import ROW
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    append_row(Path(sys.argv[1]), ROW)
print("done", flush=True)
"""


def writer(path: Path, rows: int) -> subprocess.Popen[str]:
    """Another process that appends rows; it is under way when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(rows)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state" / "ledger.sqlite"
    failed = replace(ROW, observed=replace(ROW.observed, exit_code=1, failure="out_of_memory"))
    append_row(path, ROW)
    append_row(path, failed)
    assert read_rows(path) == ([ROW, failed], 0)
    assert read_rows(path, cluster="another") == ([], 0)
    assert read_rows(path, device="another") == ([], 0)


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    append_row(tmp_path / "l", ROW)
    with closing(sqlite3.connect(tmp_path / "l")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        seconds = connection.execute("SELECT measured_step_seconds, model FROM runs").fetchone()
    assert seconds == (1.5, JOB.model.name)


def test_two_runs_that_end_at_once_are_both_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    processes = [writer(path, 20), writer(path, 20)]
    for process in processes:
        assert process.communicate(timeout=120)[0] == "done\n"
    rows, unread = read_rows(path)
    assert (len(rows), unread) == (40, 0)


def test_a_writer_that_is_killed_leaves_whole_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    before = 0
    for _ in range(3):
        process = writer(path, 10**6)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not path.exists() or rows_in(path) < before + 3):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        rows, unread = read_rows(path)
        assert len(rows) >= before + 3
        assert unread == 0
        assert all(row == ROW for row in rows)
        append_row(path, ROW)
        before = len(rows) + 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def rows_in(path: Path) -> int:
    try:
        return len(read_rows(path, device=DEVICE)[0])
    except SpecError:  # not made yet
        return 0


def test_rows_of_another_fsdpplan_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    append_row(path, ROW)
    append_row(path, ROW)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "UPDATE runs SET job = json_set(job, '$.layout.unheard_of', 3) WHERE id = 1"
        )
        connection.commit()
    assert read_rows(path) == ([ROW], 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "no ledger of fsdpplan"), (b"something else\n" * 100, "not a database")],
    ids=["empty", "no database"],
)
def test_another_file_is_no_ledger(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=words) as caught:
        read_rows(path)
    assert "--no-ledger" in str(caught.value)


def test_a_newer_ledger_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    append_row(path, ROW)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    for use in (lambda: append_row(path, ROW), lambda: read_rows(path)):
        with pytest.raises(SpecError, match="update fsdpplan"):
            use()


def test_a_ledger_that_stays_locked_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    append_row(path, ROW)
    monkeypatch.setattr("fsdpplan.files.ledger.BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(SpecError, match="locked") as caught:
            append_row(path, ROW)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be made") as caught:
        append_row(tmp_path / "file" / "ledger.sqlite", ROW)
    assert "\n" not in str(caught.value)


def test_runs_that_are_there_already_are_not_added_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    other = replace(ROW, observed=replace(ROW.observed, step_seconds=1.7))
    assert add_rows(path, [ROW, ROW, other]) == 3  # a run that was made twice is two
    assert add_rows(path, [other, ROW, ROW]) == 0
    assert add_rows(path, [ROW, ROW, ROW]) == 1
    assert len(read_rows(path)[0]) == 4


def test_a_row_of_a_table_keeps_its_cells_its_origin_and_its_software(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    told = replace(ROW, origin="mine.csv", software="torchtitan", cells=(("gpu", "H100-80GB"),))
    assert add_rows(path, [told]) == 1
    assert read_rows(path) == ([told], 0)
    renamed = replace(told, origin="yours.csv", ended_at="2027")
    assert add_rows(path, [renamed]) == 0  # the same row, from another file
    assert row_of_document(json.loads(json.dumps(row_document(told)))) == told


def test_a_ledger_from_before_tables_is_read_and_upgraded_by_the_first_new_row(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.sqlite"
    shutil.copy(RECORDED, path)
    before, unread = read_rows(path)
    assert (len(before), unread, version_of(path)) == (5, 0, 1)
    append_row(path, ROW)
    assert (read_rows(path), version_of(path)) == (([*before, ROW], 0), SCHEMA_VERSION)
    assert add_rows(path, before) == 0


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def test_the_place_is_the_one_given_or_the_variables_or_the_users_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDPPLAN_LEDGER", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ledger_path(tmp_path / "given") == tmp_path / "given"
    assert ledger_path() == tmp_path / "named"
    monkeypatch.delenv("FSDPPLAN_LEDGER")
    assert ledger_path() == tmp_path / "fsdpplan" / "ledger.sqlite"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ledger_path() == tmp_path / "home/.local/state/fsdpplan/ledger.sqlite"


def test_a_row_lists_no_hosts() -> None:
    assert not {"hosts", "nodes", "network", "weak"} & {*asdict(ROW.machines)}
