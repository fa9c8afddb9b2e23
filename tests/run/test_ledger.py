"""Every run that ends is one row, and a ledger that fails costs no run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.files.ledger import read_rows
from fsdpplan.run.follow.metrics import Measured, read_metrics
from fsdpplan.run.launch import Launch, emit_script
from fsdpplan.run.ledger import record
from fsdpplan.run.outcome import Outcome
from tests.emit.plans import make_plan

METRICS = (Path(__file__).parent / "metrics_of_a_run.jsonl").read_text()
PLAN = make_plan("cpu")
LAUNCH = Launch(script=emit_script(PLAN, Job()), plan=PLAN, origin="a test")


def outcome(folder: Path, *, exit_code: int = 0, metrics: str = METRICS, log: str = "") -> Outcome:
    (folder / "job.log").write_text(log)
    return Outcome(
        exit_code=exit_code,
        job_id=None,
        ended=True,
        seconds=3.0,
        run_folder=folder / "fsdpplan-runs" / "1",
        measured=read_metrics(metrics) if metrics else Measured(),
        log=folder / "job.log",
    )


def recorded(folder: Path, ended: Outcome) -> str | None:
    return record(LAUNCH, ended, target="here", folder=folder, ledger=folder / "ledger.sqlite")


def test_a_run_is_a_row(tmp_path: Path) -> None:
    assert recorded(tmp_path, outcome(tmp_path)) is None
    (row,), _ = read_rows(tmp_path / "ledger.sqlite")
    assert row.run_folder == "fsdpplan-runs/1"
    assert row.job.layout == PLAN.layout
    assert row.predicted.step_seconds == PLAN.estimate.step_seconds
    assert (row.observed.step_seconds, row.observed.measured_steps) == (0.25, 7)
    assert row.observed.failure is None
    assert row.observed.memory_kind == "resident"
    assert dict(row.versions)["torch"] == "2.13.0"
    assert row.tells_speed


@pytest.mark.parametrize(
    ("exit_code", "log", "metrics", "failure"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "", "out_of_memory"),
        (1, "error: no data", "", "failed"),
        (130, "", METRICS, "interrupted"),
    ],
    ids=["memory", "fault", "interrupted"],
)
def test_a_failure_is_a_row_too(
    exit_code: int, log: str, metrics: str, failure: str, tmp_path: Path
) -> None:
    ended = outcome(tmp_path, exit_code=exit_code, log=log, metrics=metrics)
    assert recorded(tmp_path, ended) is None
    (row,), _ = read_rows(tmp_path / "ledger.sqlite")
    assert (row.observed.exit_code, row.observed.failure) == (exit_code, failure)


def test_a_ledger_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("no database " * 100)
    said = recorded(tmp_path, outcome(tmp_path))
    assert said is not None
    assert "not in the ledger" in said
    assert "\n" not in said


def test_a_job_that_goes_on_is_no_row(tmp_path: Path) -> None:
    assert recorded(tmp_path, replace(outcome(tmp_path), ended=False)) is None
    assert not (tmp_path / "ledger.sqlite").exists()
