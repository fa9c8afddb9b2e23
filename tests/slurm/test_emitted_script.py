"""The emitted script on a real Slurm of two nodes."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fsdpplan import __version__
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.run.engines.engine import JobState
from fsdpplan.run.engines.slurm_text import parse_job
from fsdpplan.run.launch import emit_script
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_plan
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
HSDP = make_plan("cpu", nodes=2)
HERE = (("PYTHONPATH", str(ROOT)),)
HOSTILE_NAME = "a 'b\" \\ #c $HOME `d` é"


def trainer(**values: object) -> Job:
    return Job(python=sys.executable, env=HERE, program=Trainer(**values))  # type: ignore[arg-type]


def own(folder: Path, text: str, *args: str) -> UserProgram:
    (folder / "own.py").write_text(textwrap.dedent(text))
    return UserProgram(script=str(folder / "own.py"), args=args)


def submit(slurm: SlurmCluster, folder: Path, plan: Plan, job: Job, *options: str) -> str:
    (folder / "job.sbatch").write_text(emit_script(plan, job))
    done = slurm.run("sbatch", "--parsable", *options, "job.sbatch", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait(slurm: SlurmCluster, folder: Path, job_id: str, *, seconds: float = 240) -> JobState:
    deadline = time.monotonic() + seconds
    while True:
        state = parse_job(slurm.run("scontrol", "show", "job", job_id, cwd=folder).stdout)
        assert state is not None
        if state.ended:
            return state
        assert time.monotonic() < deadline, f"{state}\n{log_of(folder, job_id)}"
        time.sleep(0.3)


def log_of(folder: Path, job_id: str) -> str:
    path = folder / f"fsdpplan-{job_id}.out"
    return path.read_text() if path.exists() else ""


def test_sbatch_takes_the_script_and_ranks_stand_in_its_order_with_the_plan_and_all_cores(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    program = own(
        tmp_path,
        """
        import json, os, sys, time
        rank, plan = os.environ["RANK"], json.loads(os.environ["FSDPPLAN_PLAN"])
        seen = [os.uname().nodename, os.environ["SLURM_NODEID"], os.environ["LOCAL_RANK"],
                os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], plan["layout"]["dp_shard"],
                *sys.argv[1:], len(os.sched_getaffinity(0)) > 0, os.environ["MINE"],
                os.environ["SLURM_CPUS_PER_TASK"]]
        with open(f"rank{rank}.json", "w") as file:
            json.dump(seen, file)
        """,
        "$HOME it's",
        "-m\n",
    )
    env = (("MINE", "a $b 'c"),)
    job = Job(
        python=sys.executable, program=program, env=env, job_name=HOSTILE_NAME, cpus_per_task=3
    )
    # names that sort otherwise than Slurm has them
    job_id = submit(slurm, tmp_path, HSDP, job, "--nodelist=node[9-10]")
    state = wait(slurm, tmp_path, job_id)
    assert state.state == "COMPLETED", log_of(tmp_path, job_id)
    seen = {rank: json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)}
    # Ranks of a node are neighbours, as the mesh of the plan has it.
    assert [seen[rank][:3] for rank in range(4)] == [
        ["node9", "0", "0"],
        ["node9", "0", "1"],
        ["node10", "1", "0"],
        ["node10", "1", "1"],
    ]
    for rank in range(4):
        assert seen[rank][3:] == ["4", "node9", 2, "$HOME it's", "-m\n", True, "a $b 'c", "3"]
    shown = slurm.run("scontrol", "show", "job", job_id, cwd=tmp_path).stdout
    assert f"JobName={HOSTILE_NAME}\n" in shown


def test_an_allocation_that_is_not_the_plans_fails_with_one_line(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job_id = submit(slurm, tmp_path, HSDP, trainer(steps=2), "--nodes=1")
    state = wait(slurm, tmp_path, job_id)
    assert (state.state, state.exit_code) == ("FAILED", 5)
    (line,) = log_of(tmp_path, job_id).splitlines()
    assert "the plan needs 2 node(s) of 2 ranks" in line


def test_a_node_with_another_fsdpplan_stops_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    version = f"fsdpplan_version={__version__}"
    script = emit_script(HSDP, trainer(steps=2)).replace(version, "fsdpplan_version=99.0")
    (tmp_path / "job.sbatch").write_text(script)
    job_id = slurm.run("sbatch", "--parsable", "job.sbatch", cwd=tmp_path).stdout.strip()
    state = wait(slurm, tmp_path, job_id)
    assert (state.state, state.exit_code) == ("FAILED", 5)
    assert "fsdpplan 99.0 wrote the script" in log_of(tmp_path, job_id)


def test_the_signal_before_the_limit_saves_and_the_job_completes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = trainer(steps=100_000, checkpoint_dir="saved")
    job_id = submit(slurm, tmp_path, make_plan("cpu", nodes=2, per_node=1), job)
    deadline = time.monotonic() + 200
    while "step 3/" not in log_of(tmp_path, job_id):
        assert time.monotonic() < deadline, log_of(tmp_path, job_id)
        time.sleep(0.3)
    # What --signal=B:USR1@120 sends.
    slurm.run("scancel", "--batch", "--signal=USR1", job_id, cwd=tmp_path)
    state = wait(slurm, tmp_path, job_id)
    assert (state.state, state.exit_code) == ("COMPLETED", 0), log_of(tmp_path, job_id)
    assert list((tmp_path / "saved").iterdir())


def test_a_script_for_gpus_is_accepted(slurm: SlurmCluster, tmp_path: Path) -> None:
    plan = make_plan("cuda", nodes=2, per_node=8)
    for job in (Job(time="8:00:00"), Job(cpus_per_task=2, sbatch=("--gres=gpu:h100:8",))):
        (tmp_path / "job.sbatch").write_text(emit_script(plan, job))
        done = slurm.run("sbatch", "--test-only", "job.sbatch", cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_bash_runs_the_script_inside_an_allocation(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(
        emit_script(HSDP, Job(python=sys.executable, program=own(tmp_path, "print('ran')")))
    )
    salloc = ("salloc", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
    done = slurm.run(*salloc, "bash", "job.sbatch", cwd=tmp_path, seconds=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran") == 4
    failing = slurm.run("salloc", "--nodes=1", "bash", "job.sbatch", cwd=tmp_path, seconds=100)
    assert failing.returncode == 5
    assert "the plan needs 2 node(s)" in failing.stderr
