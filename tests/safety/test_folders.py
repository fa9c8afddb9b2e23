"""What lies in a folder that others may write to: records of runs, links, names."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdpplan.errors import LaunchError, SpecError
from fsdpplan.files.job_records import RECORD_NAME, RunRecord, read_record
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.run import session
from fsdpplan.run.follow.jobs import RUNS_FOLDER, RecordedRun
from fsdpplan.run.launch import Launch
from fsdpplan.trainer.checkpoint.whole_file import write_whole
from tests.emit.plans import make_plan
from tests.run.displays import Remembers

SOMEBODY_ELSE = 65534
RECORD = RunRecord(
    engine="slurm",
    jobs=("12",),
    folder="/f",
    script="/f/job.sbatch",
    plan_sha256="",
    metrics="/f/m.jsonl",
    submitted_at="2026-11-22T00:00:00+00:00",
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files to somebody else needs root")


def write(folder: Path, **values: object) -> None:
    document = {"schema_version": 1, **asdict(RECORD), **values}
    (folder / RECORD_NAME).write_text(json.dumps(document))


@pytest.mark.parametrize("name", ["jobs", "earlier"])
@pytest.mark.parametrize("job_id", ["--user=me", "-u", "", "1 2", "$(id)", "1\n"])
def test_an_id_that_would_be_an_option_is_refused(tmp_path: Path, name: str, job_id: str) -> None:
    write(tmp_path, **{name: [job_id]})
    with pytest.raises(SpecError, match="ids of jobs"):
        read_record(tmp_path)


@pytest.mark.parametrize("job_id", ["12", "team-a/train-1", "0f1e"])
def test_ids_of_jobs_are_read(tmp_path: Path, job_id: str) -> None:
    write(tmp_path, jobs=[job_id])
    record = read_record(tmp_path)
    assert record is not None
    assert record.jobs == (job_id,)


@as_root
def test_a_run_is_not_written_through_a_link_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / RUNS_FOLDER).symlink_to(tmp_path / "theirs")
    assert session._new_run_folder(tmp_path).parent == tmp_path / "theirs"
    os.lchown(tmp_path / RUNS_FOLDER, SOMEBODY_ELSE, SOMEBODY_ELSE)
    with pytest.raises(LaunchError, match="somebody else made"):
        session._new_run_folder(tmp_path)


@as_root
def test_the_script_of_somebody_elses_run_is_not_started(tmp_path: Path) -> None:
    os.chown(tmp_path, SOMEBODY_ELSE, SOMEBODY_ELSE)
    run = RecordedRun(run_folder=tmp_path, record=RECORD)
    plan = make_plan()
    with pytest.raises(LaunchError, match="started by somebody else"):
        session.resume(
            run,
            Launch(script="", plan=plan, origin=""),
            target="here",
            display=Remembers(),
            manner=session.Manner(),
        )


@pytest.mark.parametrize("write_file", [write_text_atomically, write_whole])
def test_a_file_is_written_beside_its_place_under_a_new_name_each_time(
    tmp_path: Path, write_file: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def replace(old: Path, new: Path) -> None:
        seen.append(Path(old).name)
        raise OSError("no")

    monkeypatch.setattr(os, "replace", replace)
    for _ in range(2):
        with pytest.raises((OSError, SpecError)):
            write_file(tmp_path / "plan.json", "text")  # type: ignore[operator]
    assert len(set(seen)) == 2
    assert list(tmp_path.iterdir()) == []
