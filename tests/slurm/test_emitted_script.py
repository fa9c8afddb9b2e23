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
from fsdpplan.run.follow.jobs import chosen_run
from fsdpplan.run.launch import emit_script, read_launch
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


def wait(slurm: SlurmCluster, folder: Path, job_id: str, *, seconds: float = 120) -> JobState:
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


def test_sbatch_takes_the_script_as_it_is_and_trains_on_two_nodes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job_id = submit(slurm, tmp_path, HSDP, trainer(steps=4))
    state = wait(slurm, tmp_path, job_id)
    log = log_of(tmp_path, job_id)
    assert (state.state, state.exit_code) == ("COMPLETED", 0), log
    assert "fsdpplan: node1 is ready" in log
    assert "fsdpplan: node2 is ready" in log
    metrics = tmp_path / f"fsdpplan-runs/job-{job_id}/metrics.jsonl"
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]
    assert [event["world"] for event in events if event["event"] == "summary"] == [4]
    assert chosen_run(tmp_path, job_id).measured.last_step == 4
    assert read_launch(metrics.with_name("job.sbatch")).plan == HSDP
    assert "4 processes" in log


def test_ranks_stand_on_both_nodes_with_the_plan_and_their_arguments(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    program = own(
        tmp_path,
        """
        import json, os, sys, time
        rank, plan = os.environ["RANK"], json.loads(os.environ["FSDPPLAN_PLAN"])
        seen = [os.uname().nodename, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"],
                os.environ["MASTER_ADDR"], plan["layout"]["dp_shard"], *sys.argv[1:],
                len(os.sched_getaffinity(0)) > 0, os.environ["MINE"]]
        with open(f"rank{rank}.json", "w") as file:
            json.dump(seen, file)
        """,
        "$HOME it's",
        "-m\n",
    )
    env = (("MINE", "a $b 'c"),)
    job = Job(python=sys.executable, program=program, env=env, job_name=HOSTILE_NAME)
    job_id = submit(slurm, tmp_path, HSDP, job)
    state = wait(slurm, tmp_path, job_id)
    assert state.state == "COMPLETED", log_of(tmp_path, job_id)
    seen = {rank: json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)}
    # Ranks of a node are neighbours, as the mesh of the plan has it.
    assert [seen[rank][:2] for rank in range(4)] == [
        ["node1", "0"],
        ["node1", "1"],
        ["node2", "0"],
        ["node2", "1"],
    ]
    for rank in range(4):
        assert seen[rank][2:] == ["4", "node1", 2, "$HOME it's", "-m\n", True, "a $b 'c"]
    shown = slurm.run("scontrol", "show", "job", job_id, cwd=tmp_path).stdout
    assert f"JobName={HOSTILE_NAME}\n" in shown


def test_ranks_follow_the_order_of_slurm_where_names_sort_otherwise(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    program = own(
        tmp_path,
        """
        import os
        seen = os.uname().nodename, os.environ["SLURM_NODEID"], os.environ["MASTER_ADDR"]
        with open("rank" + os.environ["RANK"], "w") as file:
            print(*seen, file=file)
        """,
    )
    job = Job(python=sys.executable, program=program)
    job_id = submit(slurm, tmp_path, HSDP, job, "--nodelist=node[9-10]")
    assert wait(slurm, tmp_path, job_id).state == "COMPLETED", log_of(tmp_path, job_id)
    seen = [(tmp_path / f"rank{rank}").read_text().strip() for rank in range(4)]
    assert seen == ["node9 0 node9", "node9 0 node9", "node10 1 node9", "node10 1 node9"]


def test_srun_gets_all_cores_of_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    program = own(
        tmp_path,
        "import os, sys\nsys.stdout.write(f\"cores {os.environ['SLURM_CPUS_PER_TASK']}\\n\")",
    )
    job = Job(python=sys.executable, program=program, cpus_per_task=3)
    job_id = submit(slurm, tmp_path, HSDP, job)
    assert wait(slurm, tmp_path, job_id).state == "COMPLETED"
    assert log_of(tmp_path, job_id).count("cores 3") == 4


def test_an_allocation_that_is_not_the_plans_fails_with_one_line(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job_id = submit(slurm, tmp_path, HSDP, trainer(steps=2), "--nodes=1")
    state = wait(slurm, tmp_path, job_id)
    assert (state.state, state.exit_code) == ("FAILED", 5)
    (line,) = log_of(tmp_path, job_id).splitlines()
    assert "the plan needs 2 node(s) of 2 ranks" in line


def test_a_failing_rank_fails_the_job_and_ends_the_others(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    program = own(
        tmp_path,
        "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(7)\ntime.sleep(300)\n",
    )
    began = time.monotonic()
    job_id = submit(slurm, tmp_path, HSDP, Job(python=sys.executable, program=program))
    state = wait(slurm, tmp_path, job_id)
    assert state.state == "FAILED"
    assert state.exit_code != 0
    assert time.monotonic() - began < 100
    assert "exitcode  : 7" in log_of(tmp_path, job_id)


def test_a_node_with_another_fsdpplan_stops_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = emit_script(HSDP, trainer(steps=2)).replace(f'"$here" {__version__}', '"$here" 99.0')
    (tmp_path / "job.sbatch").write_text(script)
    job_id = slurm.run("sbatch", "--parsable", "job.sbatch", cwd=tmp_path).stdout.strip()
    state = wait(slurm, tmp_path, job_id)
    assert (state.state, state.exit_code) == ("FAILED", 5)
    assert "fsdpplan 99.0 wrote the script" in log_of(tmp_path, job_id)


def test_the_signal_before_the_limit_saves_and_the_job_completes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = trainer(steps=100_000, checkpoint_dir="saved")
    job_id = submit(slurm, tmp_path, HSDP, job)
    deadline = time.monotonic() + 60
    while "step 3/" not in log_of(tmp_path, job_id):
        assert time.monotonic() < deadline, log_of(tmp_path, job_id)
        time.sleep(0.3)
    # What --signal=B:USR1@120 sends.
    slurm.run("scancel", "--batch", "--signal=USR1", job_id, cwd=tmp_path)
    state = wait(slurm, tmp_path, job_id)
    assert (state.state, state.exit_code) == ("COMPLETED", 0), log_of(tmp_path, job_id)
    assert list((tmp_path / "saved").iterdir())


def test_a_cancelled_job_leaves_no_rank(slurm: SlurmCluster, tmp_path: Path) -> None:
    program = own(tmp_path, "import time; print('up', flush=True); time.sleep(300)")
    job_id = submit(slurm, tmp_path, HSDP, Job(python=sys.executable, program=program))
    deadline = time.monotonic() + 60
    while log_of(tmp_path, job_id).count("up") < 4:
        assert time.monotonic() < deadline, log_of(tmp_path, job_id)
        time.sleep(0.3)
    slurm.run("scancel", job_id, cwd=tmp_path)
    assert wait(slurm, tmp_path, job_id).state == "CANCELLED"
    while still_running(str(tmp_path / "own.py")):
        assert time.monotonic() < deadline + 30
        time.sleep(0.3)


def still_running(text: str) -> bool:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


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
