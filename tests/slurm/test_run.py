"""`run` against a real Slurm: submit, follow, leave."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job, Trainer, UserProgram
from fsdpplan.errors import LaunchError
from fsdpplan.run.launch import Launch, emit_script
from fsdpplan.run.session import Outcome, run_launch
from tests.emit.plans import make_plan
from tests.run.displays import Remembers
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
HSDP = make_plan("cpu", nodes=2)
HERE = (("PYTHONPATH", str(ROOT)),)


@pytest.fixture
def run(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Job], tuple[Outcome, Remembers]]:
    """Submit a job of the two-node plan and follow it."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])

    def submit(job: Job) -> tuple[Outcome, Remembers]:
        launch, display = Launch(script=emit_script(HSDP, job), plan=HSDP, origin=""), Remembers()
        return run_launch(launch, folder=tmp_path, target="slurm", display=display), display

    return submit


def own(folder: Path, text: str) -> Job:
    (folder / "own.py").write_text(text)
    return Job(python=sys.executable, program=UserProgram(script=str(folder / "own.py")))


def test_a_job_is_submitted_and_followed_to_its_end(
    run: Callable[[Job], tuple[Outcome, Remembers]],
) -> None:
    outcome, display = run(Job(python=sys.executable, env=HERE, program=Trainer(steps=4)))
    assert (outcome.exit_code, outcome.ended) == (0, True), display.lines
    assert outcome.job_id is not None
    assert outcome.measured.summary is not None
    assert outcome.measured.summary.world == 4
    assert display.steps == [1, 2, 3, 4]
    assert any("RUNNING on node[1-2]" in state for state in display.states)
    assert any("node2 is ready" in line for line in display.lines)


def test_the_exit_code_is_the_jobs(
    run: Callable[[Job], tuple[Outcome, Remembers]], tmp_path: Path
) -> None:
    outcome, _ = run(own(tmp_path, "raise SystemExit(9)"))
    assert outcome.exit_code == 1  # torchrun's
    assert outcome.ended


def test_an_interrupt_leaves_the_job_running(
    run: Callable[[Job], tuple[Outcome, Remembers]], slurm: SlurmCluster, tmp_path: Path
) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("up*")) and time.monotonic() < deadline:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    job = own(
        tmp_path, "import os, time\nopen('up' + os.environ['RANK'], 'w').close()\ntime.sleep(300)"
    )
    outcome, display = run(job)
    thread.join()
    assert (outcome.exit_code, outcome.ended) == (130, False)
    assert any("scancel" in state for state in display.states)
    assert outcome.job_id is not None
    assert outcome.job_id in slurm.run("squeue", "--noheader", cwd=tmp_path).stdout
    slurm.run("scancel", outcome.job_id, cwd=tmp_path)


def test_a_job_that_slurm_refuses_is_not_started(
    run: Callable[[Job], tuple[Outcome, Remembers]],
) -> None:
    with pytest.raises(LaunchError, match="invalid partition") as refused:
        run(Job(partition="nowhere"))
    assert "\n" not in str(refused.value)
