"""`run`: what it says where it cannot run, and what it prints where it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import DEMO, on_a_machine_without_gpus, words

ROOT = Path(__file__).resolve().parents[2]
GPU_PLAN = words("recommend --model llama-3.2-1b --gpus 8 --hardware dgx-h100 --dp-shard 8 --tp 1")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the package is not installed
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_options: None)


def test_without_a_plan_it_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["run"]) == 2
    assert "fsdpplan recommend" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_slurm")
def test_a_plan_for_gpus_that_are_not_here_offers_a_smoke_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(GPU_PLAN) == 0
    capsys.readouterr()
    assert exit_code_of(["run"]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "fsdpplan run --smoke" in err


@pytest.mark.parametrize("content", ["", "#!/bin/bash\necho mine\n"], ids=["empty", "not ours"])
def test_a_script_that_is_not_ours_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(DEMO) == 0
    (tmp_path / "job.sbatch").write_text(content)
    capsys.readouterr()
    assert exit_code_of(["run"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--from plan" in err


def test_smoke_runs_here_or_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(DEMO) == 0
    assert exit_code_of(words("run --smoke --target slurm")) == 2
    assert "--smoke" in capsys.readouterr().err


def test_a_dry_run_shows_the_script_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(DEMO) == 0
    capsys.readouterr()
    assert exit_code_of(words("run --dry-run --target here")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n")
    assert "bash job.sbatch" in err
    assert [path.name for path in tmp_path.iterdir()] == ["fsdpplan.json"]


@pytest.mark.gloo
def test_a_smoke_run_trains_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(GPU_PLAN) == 0
    capsys.readouterr()
    code = exit_code_of(words("run --smoke --steps 8 --json"))
    out, err = capsys.readouterr()
    assert code == 0, err
    document = json.loads(out)
    assert document["job_exit_code"] == 0
    assert document["measured"]["step_seconds"] > 0
    assert document["predicted"]["step_seconds"]["expected"] > 0
    assert {row["quantity"] for row in document["comparison"]} >= {"step_seconds", "mfu_fraction"}


@pytest.mark.gloo
def test_a_run_ends_with_predicted_against_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(DEMO) == 0
    capsys.readouterr()
    code = exit_code_of(words("run --target here --steps 7"))
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "predicted" in out
    assert "measured" in out
    assert "after 7 steps" in out
    assert max(map(len, out.splitlines())) <= 80
