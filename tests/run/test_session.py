from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.slurm.header import script_digest
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import LaunchError
from fsdpplan.files.plans import write_plan
from fsdpplan.run.folder import write_job_folder
from fsdpplan.run.follow.jobs import chosen_run
from fsdpplan.run.follow.status import standing
from fsdpplan.run.launch import Launch, emit_script, read_launch, resolve_launch
from fsdpplan.run.outcome import Outcome
from fsdpplan.run.session import command_words, run_launch
from fsdpplan.run.verify import finished_run
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_plan
from tests.run.displays import Remembers

ROOT = Path(__file__).resolve().parents[2]
HSDP = make_plan("cpu", nodes=2)
PAIR = make_plan("cpu")
HERE = (("PYTHONPATH", str(ROOT)),)


def job(**trainer: object) -> Job:
    return Job(python=sys.executable, env=HERE, program=Trainer(**trainer))  # type: ignore[arg-type]


def run(folder: Path, plan: Plan, asked: Job) -> tuple[Outcome, Remembers]:
    launch = Launch(script=emit_script(plan, asked), plan=plan, origin="a test")
    display = Remembers()
    return run_launch(launch, folder=folder, target="here", display=display), display


def own_program(folder: Path, text: str, *args: str) -> Job:
    (folder / "own.py").write_text(textwrap.dedent(text))
    program = UserProgram(script=str(folder / "own.py"), args=args)
    return Job(python=sys.executable, program=program)


@pytest.mark.gloo
def test_a_job_folder_of_two_nodes_trains_on_this_host_with_its_own_trainer(tmp_path: Path) -> None:
    folder = tmp_path / "job folder"
    write_job_folder(folder, plan=HSDP, job=Job(python=sys.executable, program=Trainer(steps=9)))
    own = folder / "trainer/__main__.py"
    # a line in one write: all ranks say it
    said = 'import os\nos.write(1, b"changed by its owner\\n")\n'
    own.write_text(said + own.read_text())
    launch, display = resolve_launch(folder), Remembers()
    outcome = run_launch(launch, folder=tmp_path, target="here", display=display)
    assert outcome.exit_code == 0, display.lines
    assert "changed by its owner" in display.lines
    assert display.steps == list(range(1, 10))
    assert outcome.measured.summary is not None
    assert outcome.measured.summary.world == 4
    assert any("all 4 ranks of the 2 planned nodes" in line for line in display.lines)
    # What the run was is known without the folder.
    shutil.rmtree(folder)
    assert read_launch(outcome.run_folder / "job.sbatch").plan == HSDP
    assert finished_run(outcome.run_folder, plan_file=None, folder=tmp_path).plan == HSDP
    of_run = chosen_run(tmp_path, None)
    assert of_run.record.plan_sha256 == script_digest(launch.script)
    assert standing(of_run).planned_mfu_fraction == HSDP.estimate.mfu_fraction


@pytest.mark.gloo
def test_a_program_of_ones_own_gets_the_plan_and_its_code_counts(tmp_path: Path) -> None:
    asked = own_program(
        tmp_path,
        """
        import json, os, sys, time
        plan = json.loads(os.environ["FSDPPLAN_PLAN"])
        assert os.environ["WORLD_SIZE"] == str(plan["cluster"]["gpus"])
        metrics = os.environ["FSDPPLAN_METRICS"]
        if os.environ["RANK"] == "0":
            print("given", sys.argv[1:], flush=True)
            with open(metrics, "a") as file:
                print(json.dumps({"step": 1, "step_seconds": 0.25}), file=file)
        if os.environ["RANK"] == "1":  # torchrun ends the others where one fails
            while not (os.path.exists(metrics) and os.path.getsize(metrics)):
                time.sleep(0.01)
            sys.exit(3)
        """,
        "a b",
    )
    outcome, display = run(tmp_path, PAIR, asked)
    assert outcome.exit_code == 1  # torchrun's own, whatever the rank's
    assert "given ['a b']" in display.lines
    assert outcome.measured.median("step_seconds") == pytest.approx(0.25)


@pytest.mark.gloo
def test_an_interrupted_job_saves_and_another_run_goes_on(tmp_path: Path) -> None:
    asked = job(steps=100_000, checkpoint_dir=str(tmp_path / "saved"))
    write_plan(PAIR, tmp_path / "fsdpplan.json")
    (tmp_path / "job.sbatch").write_text(emit_script(PAIR, asked))
    command = (
        "import sys; from pathlib import Path; from fsdpplan.run.launch import resolve_launch; "
        "from fsdpplan.run.session import run_launch; "
        "from fsdpplan.run.follow.show import display_for; "
        "folder = Path(sys.argv[1]); outcome = run_launch(resolve_launch(folder), folder=folder, "
        "target='here', display=display_for(sys.stderr)); sys.exit(outcome.exit_code)"
    )
    with (tmp_path / "said").open("w") as said_to:
        process = subprocess.Popen(
            [sys.executable, "-c", command, str(tmp_path)], cwd=ROOT, stderr=said_to
        )
    try:
        deadline = time.monotonic() + 240
        while "step 3/" not in (tmp_path / "said").read_text():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        ended = process.wait(timeout=120)
    finally:  # its ranks would train on behind all tests that follow
        left = processes_that_mention(str(tmp_path))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert (ended, left) == (130, [])
    said = (tmp_path / "said").read_text()
    assert "saved" in said
    steps = int(said.rpartition("step-")[2].split()[0])
    fewer = job(steps=steps + 2, checkpoint_dir=str(tmp_path / "saved"), allow_changes=True)
    outcome, display = run(tmp_path, PAIR, fewer)
    assert outcome.exit_code == 0, display.lines
    assert display.steps == [steps + 1, steps + 2]


def processes_that_mention(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in words and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def test_runs_of_one_host_forget_the_allocation_around_them_and_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    plan = make_plan("cpu", per_node=1)
    first, display = run(tmp_path, plan, own_program(tmp_path, "print('ran')"))
    assert (first.exit_code, first.ended, first.job_id) == (0, True, None)
    assert "ran" in display.lines
    asked = own_program(
        tmp_path,
        "import os; print('{\"step\": 5}', file=open(os.environ['FSDPPLAN_METRICS'], 'a'))",
    )
    (tmp_path / "mine.jsonl").write_text('{"step": 1}\n')
    asked = Job(python=asked.python, program=asked.program, metrics="mine.jsonl")
    second, display = run(tmp_path, plan, asked)
    assert display.steps == [5]  # in the metrics that the script names, and new there
    assert first.run_folder != second.run_folder


def test_a_folder_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "fsdpplan-runs").write_text("a file")
    with pytest.raises(LaunchError, match="may write"):
        run(tmp_path, make_plan("cpu", per_node=1), Job())


def test_the_command_of_a_dry_run() -> None:
    assert command_words("here", Path("job.sbatch")) == ("bash", "job.sbatch")
    assert command_words("allocation", Path("job.sbatch")) == ("bash", "job.sbatch")
    assert command_words("slurm", Path("job.sbatch")) == ("sbatch", "job.sbatch")
    assert command_words("kubernetes", Path("a.yaml")) == ("kubectl", "apply", "-f", "a.yaml")
