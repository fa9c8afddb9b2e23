"""The published runs are found in a clone; elsewhere the error says where they are."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.table import bundled_runs, known_runs, read_runs

ROOT = Path(__file__).resolve().parents[3]


def test_every_published_row_is_read() -> None:
    runs = read_runs(bundled_runs())
    assert len(runs) == 2686
    assert len({run.source_id for run in runs}) == 17
    assert sum(run.is_timed for run in runs) > 1700


def test_without_a_clone_one_line_says_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"validate tests/golden/bench/train_runs\.csv` in a clone"):
        bundled_runs(tmp_path)


def test_all_known_rows_are_numbered_through() -> None:
    runs = known_runs()
    assert [run.row for run in runs] == list(range(len(runs)))
    assert runs[: len(read_runs(bundled_runs()))] == read_runs(bundled_runs())
    assert sum(run.source_id == "own_h100_cases" for run in runs) == 15


def test_what_is_held_back_is_every_third_source_and_in_no_table_that_is_fitted_to() -> None:
    folder = bundled_runs().parent
    held_back = tomllib.loads((folder / "held_back.toml").read_text())
    rows = {run.source_id for run in read_runs(folder / held_back["rows"])}
    outside = {run.source_id for run in read_runs(folder / "train_runs_outside.csv")}
    assert sorted(rows | outside)[2::3] == held_back["sources"] == sorted(rows)
    assert not rows & {run.source_id for run in known_runs()}


def test_nothing_of_the_package_reads_what_is_held_back() -> None:
    """Only the page that quotes its figures does."""
    held_back = tomllib.loads((bundled_runs().parent / "held_back.toml").read_text())
    programs = [*(ROOT / "fsdpplan").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
    readers = {path.name for path in programs if held_back["rows"] in path.read_text()}
    assert readers <= {"held_back_table.py"}
