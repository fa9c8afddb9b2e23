"""`run` against a real Slurm: submit, follow, leave."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import LaunchError
from fsdpplan.run.follow.jobs import chosen_run
from fsdpplan.run.launch import Launch, emit_script, read_launch
from fsdpplan.run.outcome import Outcome
from fsdpplan.run.session import run_launch
from tests.emit.plans import make_plan
from tests.run.displays import Remembers
from tests.slurm.breaking import until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.user import User, small_plan

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


def test_a_job_is_submitted_as_it_is_and_followed_to_its_end(
    run: Callable[[Job], tuple[Outcome, Remembers]], tmp_path: Path
) -> None:
    outcome, display = run(Job(python=sys.executable, env=HERE, program=Trainer(steps=4)))
    assert (outcome.exit_code, outcome.ended) == (0, True), display.lines
    assert outcome.job_id is not None
    assert outcome.measured.summary is not None
    assert outcome.measured.summary.world == 4
    assert display.steps == [1, 2, 3, 4]
    assert any("RUNNING on node[" in state for state in display.states)
    assert sum("is ready" in line for line in display.lines) == 2
    assert any("4 processes" in line for line in display.lines)
    of_run = chosen_run(tmp_path, outcome.job_id)
    assert of_run.measured.last_step == 4
    assert read_launch(outcome.run_folder / "job.sbatch").plan == HSDP
    metrics = (outcome.run_folder / "metrics.jsonl").read_text()
    events = [json.loads(line) for line in metrics.splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]


def test_a_failing_rank_ends_the_others_and_the_exit_code_is_the_jobs(
    run: Callable[[Job], tuple[Outcome, Remembers]], tmp_path: Path
) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(9)\ntime.sleep(3000)\n"
    outcome, display = run(own(tmp_path, text))
    assert outcome.exit_code == 1  # torchrun's
    assert outcome.ended
    assert any("exitcode  : 9" in line for line in display.lines)


def test_an_interrupt_leaves_the_job_running_and_a_cancelled_one_leaves_no_rank(
    run: Callable[[Job], tuple[Outcome, Remembers]], slurm: SlurmCluster, tmp_path: Path
) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 200
        while len(list(tmp_path.glob("up*"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    job = own(
        tmp_path, "import os, time\nopen('up' + os.environ['RANK'], 'w').close()\ntime.sleep(3000)"
    )
    outcome, display = run(job)
    thread.join()
    assert (outcome.exit_code, outcome.ended) == (130, False)
    assert any("fsdpplan cancel" in state for state in display.states)
    assert outcome.job_id is not None
    assert outcome.job_id in slurm.run("squeue", "--noheader", cwd=tmp_path).stdout
    assert len(ranks_of(tmp_path)) >= 4
    slurm.run("scancel", outcome.job_id, cwd=tmp_path)

    def shown() -> str:
        return slurm.run("scontrol", "show", "job", str(outcome.job_id), cwd=tmp_path).stdout

    until(lambda: "JobState=CANCELLED" in shown(), what="the end of the job")
    until(lambda: not ranks_of(tmp_path), what="the end of its ranks")


def ranks_of(folder: Path) -> list[str]:
    """Processes that run the folder's program."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder / "own.py").encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found


def test_a_job_that_slurm_refuses_is_not_started(
    run: Callable[[Job], tuple[Outcome, Remembers]],
) -> None:
    with pytest.raises(LaunchError, match="invalid partition") as refused:
        run(Job(partition="nowhere"))
    assert "\n" not in str(refused.value)


@pytest.fixture
def user(slurm: SlurmCluster, tmp_path: Path) -> Iterator[User]:
    """Somebody in a folder, who leaves no job behind."""
    folder = tmp_path / "leaves-and-comes-back"
    folder.mkdir()
    somebody = User(cluster=slurm, folder=folder)
    try:
        yield somebody
    finally:
        somebody.cancel()


def trains(user: User) -> bool:
    """Whether a step is done."""
    return (user.folder / "fsdpplan-runs").exists() and bool(user.losses())


def row(user: User) -> dict[str, Any]:
    """The only run of the folder, as `status` has it."""
    done = user.type("status", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["runs"]
    assert isinstance(found, dict)
    return found


def test_who_leaves_a_job_finds_it_again_and_ends_it(user: User) -> None:
    user.emit(small_plan(nodes=2), "--steps=100000", "--checkpoint-dir=saved")
    left = user.run()
    until(lambda: left.process.poll() is None and trains(user), what="a step")
    left.process.send_signal(signal.SIGTERM)
    ended = left.end()
    assert ended.code == 143
    assert "goes on without you" in ended.output

    found = row(user)
    assert (found["state"], found["steps"]) == ("RUNNING", 100_000), found
    assert found["step"] > 0
    hosts = json.loads(user.type("logs", "--json").stdout)["hosts"]
    assert len(hosts) == 2
    lines = user.type("logs", "--node", hosts[0], "--tail", "3").stdout.splitlines()
    assert [line.startswith(f"{hosts[0]}: ") for line in lines] == [True] * 3

    again = user.run("--attach")
    until(lambda: "RUNNING on" in again.output.read_text(), what="the job again")
    cancelled = user.type("cancel")
    assert f"cancelled job {found['run_id']}" in cancelled.stdout, cancelled.stderr
    ended = again.end()
    assert ended.code == 143, ended.output
    assert "predicted" in ended.output
    assert (row(user)["state"], row(user)["exit_code"]) == ("CANCELLED", 143)
    assert "has ended: CANCELLED" in user.type("cancel").stdout


def test_a_chain_goes_on_from_job_to_job_until_all_steps_are_done(user: User) -> None:
    user.emit(small_plan(nodes=2), "--steps=300", "--checkpoint-dir=saved")
    chain = user.run("--chain", "3")
    until(lambda: chain.process.poll() is None and trains(user), what="a step")
    chain.process.send_signal(signal.SIGUSR1)  # as before a time limit
    ended = chain.end()
    assert ended.code == 0, ended.output
    jobs = row(user)["jobs"]
    assert f"job {jobs[1]}: RUNNING" in ended.output
    assert f"cancelled job {jobs[2]} of the chain: all steps are done" in ended.output
    assert "after 300 steps" in ended.output
    assert len(user.beginnings()) == 2
    assert row(user)["state"] == "COMPLETED"
