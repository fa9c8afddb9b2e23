"""`ledger`, and what past runs change in the answers of planning."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.ledger import append_row
from tests.cli.small import DEMO, SHAPE, answer, on_a_machine_without_gpus, words
from tests.ledgers import rows_of_a_slow_cluster

ESTIMATE = words("estimate --model llama-3.2-1b --gpus 16 --hardware dgx-h100 --dp-shard 16")
SMALLEST = (
    "recommend",
    *SHAPE,
    *words("--seq-len 64 --global-batch 2 --precision fp32 --hardware cpu --gpus 2 --dp-shard 2"),
)
RECOMMEND = words("recommend --model llama-3.2-1b --gpus 8 --hardware dgx-h100")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def ledger() -> Path:
    """A ledger with runs of one cluster, where it is looked for."""
    path = Path(os.environ["FSDPPLAN_LEDGER"])
    for row in rows_of_a_slow_cluster(5):
        append_row(path, row)
    return path


def test_past_runs_correct_steps_like_theirs(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = answer(capsys, *ESTIMATE)
    plain = answer(capsys, *ESTIMATE, "--no-ledger")
    assert told["step_seconds"]["expected"] > plain["step_seconds"]["expected"]
    assert told["learned"]["runs"] == 5
    assert told["learned"]["without"] == plain["step_seconds"]
    assert plain["learned"] is None
    assert any("as 5 measured runs say" in text for text in told["assumptions"])
    elsewhere = answer(capsys, *ESTIMATE, "--hardware", "dgx-h200")["learned"]
    assert 1 < elsewhere["factor"] < told["learned"]["factor"]
    assert "is on h100-sxm-80g" in elsewhere["far"]


def test_the_ledger_may_be_named(
    ledger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("FSDPPLAN_LEDGER")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert answer(capsys, *ESTIMATE)["learned"] is None
    named = answer(capsys, *ESTIMATE, "--ledger", str(ledger))
    assert named["learned"]["runs"] == 5
    assert exit_code_of([*ESTIMATE, "--ledger", "nowhere"]) == 2
    assert exit_code_of([*ESTIMATE, "--ledger", str(ledger), "--no-ledger"]) == 2


def test_a_learned_plan_is_saved_explained_and_emitted(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(RECOMMEND) == 0
    assert "of your runs, nearest: " in " ".join(capsys.readouterr().out.split())
    assert exit_code_of(["explain"]) == 0
    assert "of your runs, nearest: " in " ".join(capsys.readouterr().out.split())
    assert exit_code_of(["emit-launch"]) == 0


def test_a_plan_of_before_there_was_learning_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(DEMO) == 0
    document = json.loads((tmp_path / "fsdpplan.json").read_text())
    for line in (document, *document["alternatives"]):
        del line["estimate"]["learned"]
    (tmp_path / "fsdpplan.json").write_text(json.dumps(document))
    assert exit_code_of(["explain"]) == 0


def test_a_ledger_that_cannot_be_read_costs_no_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(os.environ["FSDPPLAN_LEDGER"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("no database " * 100)
    (warning,) = [
        text for text in answer(capsys, *ESTIMATE)["warnings"] if text.startswith("past runs")
    ]
    assert "not a database" in warning
    assert exit_code_of([*ESTIMATE, "--ledger", str(path)]) == 2


def test_the_ledger_shows_its_runs_and_their_errors(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = answer(capsys, "ledger")
    assert len(document["runs"]) == 5
    (errors,) = document["clusters"]
    assert (errors["cluster"], errors["runs"], errors["compared"]) == ("dgx-h100", 5, 5)
    assert errors["median_abs_error_fraction"] > 0.03
    assert errors["software"] == {"fsdpplan": 5}
    assert exit_code_of(["ledger"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    flat = " ".join(out.split())
    assert "5 runs, 5 with enough steps to compare" in flat
    assert "plans learn from 5 runs of fsdpplan" in flat


def test_runs_of_one_cluster_and_a_file_of_all(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(words("ledger --cluster dgx-h100 --export runs.jsonl")) == 0
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 5
    assert json.loads(lines[0])["run_folder"] is None
    capsys.readouterr()
    assert exit_code_of(words("ledger --cluster other")) == 2
    assert "it has runs on dgx-h100" in capsys.readouterr().err


def test_without_a_ledger_it_says_what_makes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["ledger"]) == 2
    assert "fsdpplan run adds each run" in capsys.readouterr().err


@pytest.mark.gloo
def test_a_run_ends_with_predicted_against_measured_is_added_and_verified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    assert exit_code_of(SMALLEST) == 0
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code_of(words("run --target here --steps 10")) == 0
    out, err = capsys.readouterr()
    assert "predicted" in out
    assert "measured" in out
    assert "after 10 steps" in out
    assert max(map(len, out.splitlines())) <= 80
    trial = "10 steps on made-up tokens, without checkpoints, so it starts once"
    assert f"fsdpplan.json: trains {trial}; log and metrics in " in err.splitlines()[0]
    assert "next: fsdpplan verify" in err
    (row,) = answer(capsys, "ledger")["runs"]
    assert row["observed"]["exit_code"] == 0
    verified = answer(capsys, "verify")
    assert verified["measured"]["step_seconds"] == row["observed"]["step_seconds"]
    assert verified["plan_sha256"] == row["plan_sha256"]


def test_a_smoke_run_is_of_no_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(DEMO) == 0
    capsys.readouterr()
    assert exit_code_of(words("run --smoke --dry-run --ledger some.sqlite")) == 2
    assert "leave it out" in capsys.readouterr().err
