from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.job_records import Ending, RunRecord, read_record, write_record
from fsdpplan.run.engines.engine import Forgotten, JobState
from fsdpplan.run.follow import jobs
from fsdpplan.run.follow.jobs import chosen_run, remember_cancelled, runs_of, state_of

RECORD = RunRecord(
    engine="slurm",
    jobs=("77",),
    folder="/a b",
    script="/a b/job.sbatch",
    plan_sha256="0" * 64,
    metrics="/a b/metrics.jsonl",
    submitted_at="2026-11-22T10:00:00+00:00",
)


def run_folder(folder: Path, name: str) -> Path:
    path = folder / "fsdpplan-runs" / name
    path.mkdir(parents=True)
    return path


def test_the_newest_run_comes_first_and_others_are_named(tmp_path: Path) -> None:
    for name, job_id, second in (("b", "1", 1), ("a", "2", 2), ("c", "3", 0)):
        at = f"2026-11-22T10:00:0{second}+00:00"
        write_record(run_folder(tmp_path, name), replace(RECORD, jobs=(job_id,), submitted_at=at))
    run_folder(tmp_path, "no-record")
    assert [run.shown_id for run in runs_of(tmp_path)] == ["2", "1", "3"]
    assert chosen_run(tmp_path, None).shown_id == "2"
    assert chosen_run(tmp_path, "1").run_folder.name == "b"
    assert chosen_run(tmp_path, "c").shown_id == "3"
    with pytest.raises(SpecError, match="name one of 2, 1, 3"):
        chosen_run(tmp_path, "9")


def test_a_bare_job_is_what_its_own_copy_of_the_script_says(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text("export FSDPPLAN_METRICS=later.jsonl\n")
    old, new = run_folder(tmp_path, "job-6"), run_folder(tmp_path, "job-7")
    (new / "job.sbatch").write_text("#!/bin/bash\n")
    runs = {run.shown_id: run.record for run in runs_of(tmp_path)}
    assert runs["7"].metrics == str(new / "metrics.jsonl")
    assert runs["7"].script == str(new / "job.sbatch")
    # An older script left none.
    assert runs["6"].metrics == str(tmp_path / "later.jsonl")
    assert list(old.iterdir()) == []


def test_a_chain_is_one_run_under_each_of_its_names(tmp_path: Path) -> None:
    record = replace(RECORD, jobs=("7", "8", "9"), earlier=("3",))
    write_record(run_folder(tmp_path, "a"), record)
    run = chosen_run(tmp_path, None)
    assert run.shown_id == "7-9"
    assert all(run.is_called(name) for name in ("7", "8", "9", "3", "a", "7-9"))


class Engine:
    """Says one thing of each job."""

    def __init__(self, **states: str) -> None:
        self.states = states

    def state(self, job_id: str) -> JobState:
        word = self.states.get(f"job{job_id}")
        if word is None:
            raise Forgotten("forgotten")
        return JobState(
            state=word,
            ended=word not in ("PENDING", "RUNNING"),
            succeeded=word == "COMPLETED",
            reason="",
            exit_code=0,
            nodes="",
            log=Path("/a b/log"),
        )


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ({"job7": "RUNNING", "job8": "PENDING"}, "RUNNING"),
        ({"job7": "TIMEOUT", "job8": "PENDING"}, "PENDING"),
        ({"job7": "TIMEOUT", "job8": "COMPLETED"}, "COMPLETED"),
    ],
)
def test_a_chain_stands_where_its_first_job_stands_that_goes_on(
    states: dict[str, str], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "engine_of", lambda _: Engine(**states))
    write_record(run_folder(tmp_path, "a"), replace(RECORD, jobs=("7", "8")))
    run = chosen_run(tmp_path, None)
    found = state_of(run)
    assert found is not None
    assert found.state == state
    record = read_record(run.run_folder)
    assert record is not None
    if state == "COMPLETED":
        assert (record.ending, record.log) == (Ending(state=state, exit_code=0), "/a b/log")
    else:
        assert record.ending is None


def test_a_cancelled_job_that_is_forgotten_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "engine_of", lambda _: Engine())
    write_record(run_folder(tmp_path, "a"), RECORD)
    remember_cancelled(chosen_run(tmp_path, None))
    state = state_of(chosen_run(tmp_path, None))
    assert state is not None
    assert (state.state, state.shell_code) == ("CANCELLED", 143)
