"""A run that goes on in a folder of checkpoints is found by the next one before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpplan.trainer.checkpoint import owner as owners
from fsdpplan.trainer.checkpoint.owner import (
    OWNER,
    SAVES,
    leave_folder,
    note_saved,
    parsed,
    require_free,
    require_kept,
    take_folder,
)
from fsdpplan.trainer.errors import TrainerError

WRITES = (
    "import sys, time; from pathlib import Path; from fsdpplan.trainer.checkpoint.owner import *; "
)
BEGINS = f"{WRITES}take_folder(Path(sys.argv[1])); print('here', flush=True); time.sleep(600)"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun in the folder, and lives."""
    words = [sys.executable, "-c", BEGINS, str(tmp_path)]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=outside) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def test_one_that_lives_is_refused_until_it_has_ended(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(TrainerError, match=rf"goes on \(process {other.pid} on .*kill {other.pid}"):
        require_free(tmp_path)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    require_free(tmp_path)  # a zombie saves nothing
    other.wait()
    require_free(tmp_path)


def test_another_process_that_has_its_number_now_is_not_it(tmp_path: Path) -> None:
    text = take_folder(tmp_path)
    found = parsed(text.replace(f" {os.getpid()} ", " 1 "))
    assert found is not None
    assert not owners.goes_on(found, {})


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that says what lies in a file, and keeps what it was asked."""
    squeue = tmp_path / "bin/squeue"
    squeue.parent.mkdir()
    squeue.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\ncat {tmp_path}/says\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    return tmp_path


def elsewhere(folder: Path, job: str, step: str = "") -> None:
    (folder / OWNER).write_text(f"elsewhere 12 0a1b began=34 job={job} step={step}\n")


def test_a_job_elsewhere_is_asked_about(slurm: Path) -> None:
    elsewhere(slurm, "7", "0")
    (slurm / "says").write_text("7.0 llama\n")
    with pytest.raises(TrainerError, match=r"\(job 7, process 12 on elsewhere\).* scancel 7"):
        require_free(slurm)
    assert (slurm / "asked").read_text() == "--noheader --steps=7.0\n"
    (slurm / "says").write_text("")  # it has ended
    require_free(slurm)
    (slurm / "says").unlink()  # nobody answers
    require_free(slurm)


def test_a_job_without_steps_is_asked_about_as_a_whole(slurm: Path) -> None:
    elsewhere(slurm, "7")
    (slurm / "says").write_text("7 llama\n")
    with pytest.raises(TrainerError, match="job 7"):
        require_free(slurm)
    assert "--jobs=7 --states=RUNNING,SUSPENDED" in (slurm / "asked").read_text()


def test_an_earlier_attempt_of_this_job_is_no_other_run(slurm: Path) -> None:
    elsewhere(slurm, "9", "0")
    (slurm / "says").write_text("9.0 llama\n")
    require_free(slurm)
    assert not (slurm / "asked").exists()


@pytest.mark.parametrize(
    "text", ["", "n1 12 0a1b\n", "n1 x 0a1b began=3\n", "\udcff" * 3, "a" * 999]
)
def test_what_names_nobody_stops_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / OWNER).write_bytes(text.encode("utf-8", "surrogateescape"))
    require_free(tmp_path)


def test_a_run_that_has_ended_takes_back_what_is_its_own(tmp_path: Path) -> None:
    first = take_folder(tmp_path)
    second = take_folder(tmp_path)
    leave_folder(tmp_path, first)
    assert (tmp_path / OWNER).exists()
    leave_folder(tmp_path, second)
    assert not (tmp_path / OWNER).exists()
    leave_folder(tmp_path / "gone", second)


def test_what_a_run_has_saved_is_known_where_its_folder_is_gone(tmp_path: Path) -> None:
    run, saved = tmp_path / "run", tmp_path / "not mounted/saved"
    require_kept(None, saved)
    require_kept(run, saved)
    note_saved(run, saved / "step-00000005")  # no folder of a run, and none is made
    assert not run.exists()
    run.mkdir()
    note_saved(run, saved / "step-00000005")
    note_saved(run, saved / "step-00000010")
    with (run / SAVES).open("a") as notes:
        notes.write('{"checkpoint": "step-0')  # the disk was full
    with pytest.raises(TrainerError, match=r"saved step-00000010 in .*put it back.*or, to begin"):
        require_kept(run, saved)
    require_kept(run, tmp_path / "another")
    (run / SAVES).unlink()
    require_kept(run, saved)


def test_a_note_that_cannot_be_written_is_no_reason_to_end(tmp_path: Path) -> None:
    (tmp_path / SAVES).mkdir()
    note_saved(tmp_path, tmp_path / "step-00000005")
    require_kept(tmp_path, tmp_path)
