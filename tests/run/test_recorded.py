"""Run folders, scripts and ledgers that fsdpplan 0.2.0 left are of use to later ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.ledger import read_rows
from fsdpplan.run.follow.jobs import chosen_run, runs_of, unreadable_runs
from fsdpplan.run.launch import read_launch
from fsdpplan.run.plans import read_plan
from fsdpplan.run.verify import finished_run

RECORDED = Path(__file__).parent.parent / "recordings" / "0.2.0"
FOLDER_THEN = "/home/ada/job"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The recorded folder, its records saying that they lie here."""
    here = tmp_path / "job"
    shutil.copytree(RECORDED / "folder", here)
    for record in here.glob("fsdpplan-runs/*/job.json"):
        record.write_text(record.read_text().replace(FOLDER_THEN, str(here)))
    return here


def test_a_run_of_0_2_0_is_listed_and_stands_as_it_ended(folder: Path) -> None:
    assert unreadable_runs(folder) == ()
    (run,) = runs_of(folder)
    assert run == chosen_run(folder, "20261127-185753")
    ending = run.record.ending
    assert ending is not None
    assert (ending.state, ending.exit_code, run.record.in_ledger) == ("COMPLETED", 0, True)
    assert run.measured.steps[-1].step == 12


def test_a_run_of_0_2_0_is_compared_with_its_plan(folder: Path) -> None:
    run = finished_run(None, plan_file=None, folder=folder)
    assert run.plan.layout == read_plan(folder / "fsdpplan.json").layout
    metrics = folder / "fsdpplan-runs" / "20261127-185753" / "metrics.jsonl"
    moved = folder / "metrics.jsonl"
    shutil.copy(metrics, moved)
    # without its script, the plan in the file is known as the run's by its digest then
    named = finished_run(moved, plan_file=folder / "fsdpplan.json", folder=folder)
    assert (named.plan_sha256, named.measured) == (run.plan_sha256, run.measured)


@pytest.mark.parametrize(
    ("name", "kind", "plan"),
    [("job.sbatch", "script", "reshard"), ("trainjob.yaml", "manifest", "mixture")],
)
def test_what_0_2_0_emitted_is_known_with_its_plan(name: str, kind: str, plan: str) -> None:
    launch = read_launch(RECORDED / name)
    assert launch.kind == kind
    assert launch.plan.layout == read_plan(RECORDED / "plans" / f"{plan}.json").layout


def test_the_ledger_of_0_2_0_is_read_whole_and_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(RECORDED / "ledger.sqlite", tmp_path)
    rows, unread = read_rows(tmp_path / "ledger.sqlite")
    assert (len(rows), unread) == (5, 0)
    layout = read_plan(RECORDED / "folder" / "fsdpplan.json").layout
    assert {row.job.layout for row in rows} == {layout}
    words = (
        "recommend --layers 4 --hidden 64 --ffn-hidden 128 --heads 4 --kv-heads 2 --vocab 256 "
        "--seq-len 64 --global-batch 4 --precision fp32 --hardware cpu --gpus 2 --json --ledger"
    )
    assert exit_code_of([*words.split(), "ledger.sqlite"]) == 0
    learned = json.loads(capsys.readouterr().out)["plans"][0]["estimate"]["learned"]
    assert learned["runs"] == 5


def test_commands_take_what_0_2_0_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for words in ("status", "verify", "logs", "explain", "emit-launch", "run --dry-run"):
        assert exit_code_of(words.split()) == 0, words
    assert "COMPLETED" in capsys.readouterr().out
