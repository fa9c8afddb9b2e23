"""A program of the user's own that reports its steps ends beside its prediction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpplan.cli.views.outcome import outcome_json, outcome_table
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.files.plans import plan_json
from fsdpplan.run.fallback import Attempt
from fsdpplan.run.follow.metrics import Measured, read_metrics
from fsdpplan.run.launch import Launch, emit_script
from fsdpplan.run.outcome import Outcome
from fsdpplan.trainer import TrainerError
from fsdpplan.trainer.user import report
from tests.emit.plans import make_plan

OWN = Path(__file__).parent / "own"
ROOT = Path(__file__).parents[2]
MEASURED = ("step_seconds", "tokens_per_second", "mfu_fraction", "peak_allocated_bytes")
PLAN = (
    "recommend --layers 4 --hidden 64 --ffn-hidden 128 --heads 4 --kv-heads 4 --vocab 64 "
    "--seq-len 16 --global-batch 16 --precision fp32 --hardware cpu --gpus 2 --gpus-per-node 2 "
    "--sharding fsdp --dp-shard 2 --micro-batch 8 --program own"
)


def fsdpplan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fsdpplan", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.gloo
@pytest.mark.parametrize("script", ["vit.py", "plain_fsdp.py"])
def test_a_program_of_ones_own_ends_beside_its_prediction(script: str, tmp_path: Path) -> None:
    planned = fsdpplan(tmp_path, *PLAN.split())
    assert planned.returncode == 0, planned.stderr
    ran = fsdpplan(tmp_path, "run", "--script", str(OWN / script), "--no-ledger", "--json")
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["steps"] == 12
    rows = {row["quantity"]: row for row in document["comparison"]}
    for quantity in MEASURED:
        assert rows[quantity]["predicted"] > 0
        assert rows[quantity]["measured"] > 0
    assert "the plan has" not in ran.stderr  # the batch is the plan's
    status = json.loads(fsdpplan(tmp_path, "status", "--json").stdout)
    assert '"step": 12' in json.dumps(status)
    held = fsdpplan(tmp_path, "verify", "--json")
    assert held.returncode == 0, held.stderr
    (folder,) = (tmp_path / "fsdpplan-runs").iterdir()
    measured = read_metrics((folder / "metrics.jsonl").read_text())
    assert [step.step for step in measured.steps] == list(range(1, 13))
    assert measured.steps[-1].loss is not None
    assert measured.steps[0].loss is not None
    assert measured.steps[-1].loss < measured.steps[0].loss
    assert measured.summary is not None
    assert measured.summary.world == 2


def ended(script: str, measured: Measured, *, shrunk: bool = False) -> list[Attempt]:
    plan = make_plan()
    program: Any = {} if not script else {"program": UserProgram(script=script)}
    text = emit_script(plan, Job(**program))
    outcome = Outcome(
        exit_code=0, job_id=None, ended=True, seconds=9.0, run_folder=Path("r"), measured=measured
    )
    launch = Launch(script=text, plan=plan, origin="here", shrunk=shrunk)
    return [Attempt(launch=launch, outcome=outcome, next_layout=None)]


def test_nothing_is_compared_where_nothing_was_measured() -> None:
    silent = outcome_table(ended("mine.py", Measured()), width=80)
    assert "mine.py reported no steps" in silent
    assert "report_step(loss=loss, tokens=tokens)" in " ".join(silent.split())
    assert "unknown" not in silent
    assert "0 steps" not in silent
    ours = outcome_table(ended("", Measured()), width=80)
    assert "unknown" not in ours
    assert "ended after 0 steps" in ours


STEPS = "".join(f'{{"step": {n}, "loss": 2.0, "step_seconds": 0.5}}\n' for n in range(1, 9))


def test_a_smoke_run_of_an_own_model_is_not_held_to_that_of_another() -> None:
    measured = read_metrics(STEPS)
    whole = ended("mine.py", measured)
    assert "predicted" in outcome_table(whole, width=80)
    small = ended("mine.py", measured, shrunk=True)
    told = " ".join(outcome_table(small, width=80).split())
    assert "mine.py trains a model of its own, so there is nothing to compare" in told
    assert "ended after 8 steps" in told
    assert json.loads(outcome_json(small))["comparison"] == []
    assert json.loads(outcome_json(whole))["comparison"]
    ours = ended("", measured, shrunk=True)
    assert "predicted" in outcome_table(ours, width=80)


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a job's program reports, in a job of one process."""
    plan = make_plan(per_node=1)
    monkeypatch.setenv("FSDPPLAN_METRICS", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setenv("FSDPPLAN_PLAN", plan_json(plan))
    monkeypatch.setattr(report, "_reporter", None)
    monkeypatch.setattr("atexit.register", lambda _: None)
    return tmp_path / "metrics.jsonl"


def reporter() -> report.Reporter:
    assert report._reporter is not None
    return report._reporter


def test_a_loop_reports_what_it_knows(
    metrics: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FSDPPLAN_PROMETHEUS", str(metrics.with_name("run.prom")))
    for number in range(1, 4):
        report.report_step(loss=torch.tensor(float(number), requires_grad=True))
    report.report_step(tokens=64)  # the plan's, and no loss
    reporter().close()
    measured = read_metrics(metrics.read_text())
    assert [(one.step, one.loss) for one in measured.steps] == [(1, 1), (2, 2), (3, 3), (4, None)]
    assert measured.steps[0].step_seconds is None
    assert all(one.step_seconds for one in measured.steps[1:])
    assert measured.summary is not None
    prom = metrics.with_name("run.prom").read_text()
    assert "training_running{" in prom
    assert "training_step{" in prom
    assert capsys.readouterr().err == ""


def test_a_resumed_program_says_where_it_is(metrics: Path) -> None:
    metrics.write_text("".join(f'{{"event": "step", "step": {n}}}\n' for n in range(1, 9)))
    report.report_step(loss=1.0, step=6)
    report.report_step(loss=1.0)
    reporter().close()
    assert [one.step for one in read_metrics(metrics.read_text()).steps] == [*range(1, 6), 6, 7]


def test_another_batch_than_the_plans_is_said_once(
    metrics: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        report.report_step(loss=1.0, tokens=32)
    reporter().close()
    err = capsys.readouterr().err
    assert err.count("a step trains 32 tokens, and the plan has 64") == 1
    line = json.loads(metrics.read_text().splitlines()[1])
    assert line["tokens_per_second"] == pytest.approx(32 / line["step_seconds"])


def test_outside_of_a_job_nothing_happens(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDPPLAN_PLAN")
    with pytest.raises(TrainerError, match="holds no plan"):
        report.report_step(loss=1.0)
    monkeypatch.delenv("FSDPPLAN_METRICS")
    report.report_step(loss=1.0)
    assert report._reporter is None
    assert not metrics.exists()


def test_a_plan_that_was_not_smoked_predicts() -> None:
    (attempt,) = ended("mine.py", Measured())
    assert attempt.launch.predicts
    assert not replace(attempt.launch, shrunk=True).predicts
