from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.slurm.header import read_metrics_path
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json, read_plan
from fsdpplan.run.folder import trainer_sources, write_job_folder
from fsdpplan.run.launch import read_launch, resolve_launch
from tests.emit.plans import make_plan

PLAN = make_plan("cpu", nodes=2)


def test_a_job_folder_holds_all_that_a_job_needs(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "my job"
    paths = write_job_folder(folder, plan=PLAN, job=Job())
    assert all(path.is_file() for path in paths)
    assert read_plan(folder / "fsdpplan.json") == PLAN
    assert resolve_launch(folder).plan == PLAN
    copied = (path for path in (folder / "trainer").rglob("*") if path.is_file())
    names = {str(path.relative_to(folder / "trainer")) for path in copied}
    assert names == set(trainer_sources())
    assert {"__main__.py", "parallel/mesh.py"} <= names
    assert not list(folder.parent.glob(".*"))


def test_the_copied_trainer_needs_no_fsdpplan(tmp_path: Path) -> None:
    write_job_folder(tmp_path / "job", plan=PLAN, job=Job())
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job/trainer/__main__.py"), "--help"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--checkpoint-dir" in done.stdout


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("keep")
    with pytest.raises(SpecError, match="exists already"):
        write_job_folder(tmp_path, plan=PLAN, job=Job())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_job_folder(tmp_path / "empty", plan=PLAN, job=Job())
    assert (tmp_path / "empty/job.sbatch").exists()


def test_a_place_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="--out"):
        write_job_folder(tmp_path / "file" / "job", plan=PLAN, job=Job())


def test_the_plan_of_a_folder_is_found_where_it_was_moved_or_run(tmp_path: Path) -> None:
    write_job_folder(tmp_path / "job", plan=PLAN, job=Job(metrics="m.jsonl"))
    launch = read_launch(tmp_path / "job/job.sbatch")
    assert launch.plan == PLAN
    assert launch.plan_file == (tmp_path / "job/fsdpplan.json").read_text()
    assert read_metrics_path(launch.script) == "m.jsonl"
    copy = tmp_path / "run/job.sbatch"
    copy.parent.mkdir()
    copy.write_text(launch.script)
    assert read_launch(copy).plan == PLAN
    (tmp_path / "job").rename(tmp_path / "moved")
    assert read_launch(tmp_path / "moved/job.sbatch").plan == PLAN
    with pytest.raises(SpecError, match="neither there nor beside it"):
        read_launch(copy)
    # Another plan that lies beside is not the script's.
    other = make_plan("cpu", nodes=4)
    (tmp_path / "run/fsdpplan.json").write_text(plan_json(other))
    with pytest.raises(SpecError, match="was changed after it was emitted"):
        read_launch(copy)
    (tmp_path / "moved").rename(tmp_path / "job")
    assert read_launch(copy).plan == PLAN
