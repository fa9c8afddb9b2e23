from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpplan.emit.header import plan_digest
from fsdpplan.emit.job import Job, Trainer, UserProgram
from fsdpplan.emit.script import render_launch
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.network import Network
from fsdpplan.spec.plan import Plan
from tests.emit.networks import GIB, INFINIBAND, networks, on
from tests.emit.plans import make_plan

PLANS = {
    "one cpu": make_plan("cpu", per_node=1),
    "cpu node": make_plan("cpu", per_node=2),
    "cpu nodes": make_plan("cpu", nodes=2),
    "gpu node": make_plan("cuda", per_node=8),
    "gpu nodes": make_plan("cuda", nodes=16, per_node=4),
}
FULL = Job(
    program=Trainer(steps=5, data="a b.bin", checkpoint_dir="ck", checkpoint_every=2, seed=1),
    time="8:00:00",
    partition="gpu",
    account="acc",
    qos="high",
    sbatch=("--constraint=h100&ib", "--requeue"),
    env_setup=("module load cuda", "source it's/activate"),
    env=(("A", "$b"), ("C", "'")),
    metrics="m.jsonl",
)
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
HOSTILE = st.one_of(
    WORDS,
    st.sampled_from(
        ["$(touch x)", "`id`", "'", '"', "\\", "a\\", "-x", "--", "#", ";", "&", "*", "~", "!", " "]
    ),
    st.sampled_from(["\n#SBATCH --nodes=99", "FSDPPLAN_PLAN_END", "\r\n", "\u2019", "\u00a0", "}"]),
)


def emit(plan: Plan, job: Job | None = None, *, version: str = "1.2.3") -> str:
    return render_launch(plan=plan, plan_json=plan_json(plan), job=job or Job(), version=version)


def shellcheck(script: str) -> str:
    command = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([command, "-"], input=script, text=True, capture_output=True, check=False)
    return done.stdout + done.stderr


def bash_objects(script: str) -> str:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    return done.stderr


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "job", [Job(), FULL, Job(program=UserProgram(script="t.py", args=("$x",)))]
)
def test_shellcheck_and_bash_find_nothing(name: str, job: Job) -> None:
    script = emit(PLANS[name], job)
    assert shellcheck(script) == ""
    assert bash_objects(script) == ""


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(network=networks())
def test_shellcheck_and_bash_find_nothing_on_any_network(network: Network) -> None:
    script = emit(on(network, PLANS["gpu nodes"]), Job(exclude=("n[01-03]", "x")))
    assert shellcheck(script) == ""
    assert bash_objects(script) == ""


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(words=st.lists(HOSTILE, min_size=1, max_size=5), value=HOSTILE)
def test_shellcheck_and_bash_find_nothing_with_hostile_strings(
    words: list[str], value: str
) -> None:
    job = Job(
        program=UserProgram(script=words[0] or "x", args=tuple(words)),
        env=(("HOSTILE", value),),
        env_setup=tuple(words),
        python=value or "python3",
        metrics=value,
    )
    script = emit(PLANS["cpu nodes"], job)
    assert "\r" not in script
    assert shellcheck(script) == ""
    assert bash_objects(script) == ""


@pytest.mark.parametrize("name", PLANS)
def test_every_line_of_slurm_is_static_and_comes_before_the_first_command(name: str) -> None:
    lines = emit(PLANS[name], FULL).splitlines()
    sbatch = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(sbatch) < first_command
    assert not any("$" in lines[i] for i in sbatch)


def sbatch_options(plan: Plan, job: Job) -> list[str]:
    lines = emit(plan, job).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_slurm_is_asked_for_what_the_plan_uses() -> None:
    assert sbatch_options(PLANS["gpu nodes"], Job(time="8:00:00")) == [
        "--job-name=fsdpplan",
        "--nodes=16",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--exclusive",
        "--mem=0",
        "--time=8:00:00",
        "--output=fsdpplan-%j.out",
    ]
    cpu = sbatch_options(PLANS["cpu nodes"], Job())
    assert "--cpus-per-task=2" in cpu
    assert not any("gpu" in option or "exclusive" in option for option in cpu)


def test_cores_given_take_the_place_of_whole_nodes() -> None:
    options = sbatch_options(PLANS["gpu nodes"], Job(cpus_per_task=32))
    assert "--cpus-per-task=32" in options
    assert "--exclusive" not in options


def test_gpus_may_be_asked_for_by_gres() -> None:
    options = sbatch_options(PLANS["gpu nodes"], Job(sbatch=("--gres=gpu:h100:4",)))
    assert "--gres=gpu:h100:4" in options
    assert not any(option.startswith("--gpus-per-node") for option in options)


def test_a_limit_with_checkpoints_asks_for_a_signal_to_the_shell_alone() -> None:
    assert "--signal=B:USR1@120" in sbatch_options(PLANS["gpu nodes"], FULL)


@pytest.mark.parametrize("name", ["job_name", "partition", "account", "qos", "output"])
def test_a_line_break_in_a_value_of_slurm_is_refused(name: str) -> None:
    values: dict[str, Any] = {name: "a\n#SBATCH --nodes=99"}
    with pytest.raises(SpecError, match=name.replace("_", ".")):
        emit(PLANS["cpu node"], Job(**values))


def test_options_without_a_meaning_are_refused() -> None:
    with pytest.raises(SpecError, match="gloo"):
        emit(PLANS["cpu node"], Job(nccl_debug="INFO"))
    with pytest.raises(SpecError, match="free port"):
        emit(PLANS["gpu node"], Job(port=29500))


def test_no_script_falls_back_to_localhost_on_several_nodes() -> None:
    script = emit(PLANS["gpu nodes"])
    assert "--standalone" not in script
    assert "localhost" not in script
    assert "127.0.0.1" not in script


@dataclass(frozen=True)
class Ran:
    """What a script did."""

    code: int
    said: str
    torchrun: list[list[str]]
    """Arguments of each torchrun that was started."""
    plans: list[str]
    """The plan that each was given."""
    environments: list[dict[str, str]]
    """The environment of each."""
    srun: list[str]
    """Arguments of srun before the command."""


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A folder of stand-ins: `python3` writes down its arguments, `srun` starts the command once a
    node, as Slurm would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    recorder = f"""#!/bin/bash
if [ "$1" = -c ]; then echo "ready ${{*:3}}"; exit; fi
out=$(mktemp {tmp_path}/torchrun.XXXXXX)
env -0 >"$out.env"
printf '%s\\0' "$@" >"$out"
printf '%s' "$FSDPPLAN_PLAN" >"$out.plan"
[ -z "${{LINGER:-}}" ] || {{ sleep 30 & wait; }}
exit "${{CODE:-0}}"
"""
    slurm = f"""#!/bin/bash
while [ "$1" != bash ]; do printf '%s\\0' "$1" >>{tmp_path}/srun; shift; done
for node in $NODES; do SLURMD_NODENAME=$node "$@" || code=$?; done
exit "${{code:-0}}"
"""
    hostnames = "#!/bin/bash\nprintf '%s\\n' $NODES\n"
    for name, text in (("python3", recorder), ("srun", slurm), ("scontrol", hostnames)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return tmp_path


def environment(bench: Path, **values: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return {**clean, "PATH": f"{bench}/bin:{os.environ['PATH']}", **values}


def run(bench: Path, script: str, **values: str) -> Ran:
    path = bench / "job.sbatch"
    path.write_bytes(script.encode())
    done = subprocess.run(
        ["bash", str(path)],
        cwd=bench,
        env=environment(bench, **values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    records = sorted(p for p in bench.glob("torchrun.*") if p.suffix not in (".plan", ".env"))
    srun = bench / "srun"
    ran = Ran(
        code=done.returncode,
        said=done.stdout + done.stderr,
        torchrun=[path.read_bytes().decode().split("\0")[:-1] for path in records],
        plans=[path.with_name(path.name + ".plan").read_text() for path in records],
        environments=[exported(path.with_name(path.name + ".env")) for path in records],
        srun=srun.read_text().split("\0")[:-1] if srun.exists() else [],
    )
    for path in (*bench.glob("torchrun.*"), srun):
        path.unlink(missing_ok=True)
    return ran


def exported(path: Path) -> dict[str, str]:
    """Variables as `env -0` writes them."""
    pairs = (line.partition("=") for line in path.read_text().split("\0")[:-1])
    return {name: value for name, _, value in pairs}


def test_bash_runs_a_single_node_here(bench: Path) -> None:
    plan = PLANS["cpu node"]
    ran = run(bench, emit(plan, Job(program=Trainer(steps=3))), FSDPPLAN_METRICS="m x")
    assert ran.code == 0, ran.said
    assert ran.torchrun == [
        [
            *("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"),
            *("--standalone", "--local-addr=127.0.0.1"),
            *("-m", "fsdpplan.trainer", "--steps=3", "--metrics=m x"),
        ]
    ]
    assert [plan_digest(text) for text in ran.plans] == [plan_digest(plan_json(plan))]


def test_cpu_ranks_of_several_nodes_run_on_one_host_and_say_so(bench: Path) -> None:
    ran = run(bench, emit(PLANS["cpu nodes"]))
    assert ran.code == 0
    assert "all 4 ranks of the 2 planned nodes" in ran.said
    assert "--nproc-per-node=4" in ran.torchrun[0]


def test_gpus_on_several_nodes_never_run_on_one_host(bench: Path) -> None:
    ran = run(bench, emit(PLANS["gpu nodes"]))
    assert ran.code == 5
    assert len(ran.said.strip().splitlines()) == 1
    assert "sbatch" in ran.said
    assert ran.torchrun == []


ALLOCATION = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "96(x1),48",
    "NODES": "n1 n2",
}


def test_in_an_allocation_each_node_joins_the_first_one(bench: Path) -> None:
    ran = run(bench, emit(make_plan("cuda", nodes=2, per_node=8)), **ALLOCATION)
    assert ran.code == 0, ran.said
    step = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=48"]
    step += ["--export=ALL", "--label"]
    assert ran.srun == [*step, *step, "--kill-on-bad-exit=1"]
    first, second = sorted(ran.torchrun, key=lambda words: "is_host=false" in " ".join(words))
    shared = ["--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=n1:22345", "--rdzv-id=12345.0"]
    assert set(shared) < set(first)
    assert set(shared) < set(second)
    assert {"--rdzv-conf=is_host=true", "--local-addr=n1"} < set(first)
    assert {"--rdzv-conf=is_host=false", "--local-addr=n2"} < set(second)
    assert "ready n1 1.2.3 8 n1" in ran.said


def test_a_port_can_be_fixed(bench: Path) -> None:
    ran = run(bench, emit(make_plan("cuda", nodes=2), Job(port=29500)), **ALLOCATION)
    assert "--rdzv-endpoint=n1:29500" in ran.torchrun[0]


def test_inside_a_step_srun_overlaps(bench: Path) -> None:
    ran = run(bench, emit(make_plan("cuda", nodes=2)), **ALLOCATION, SLURM_STEP_ID="0")
    assert "--overlap" in ran.srun


@pytest.mark.parametrize("name", ["gpu node", "gpu nodes", "cpu node"])
def test_an_allocation_of_another_size_is_refused(bench: Path, name: str) -> None:
    ran = run(bench, emit(PLANS[name]), **ALLOCATION)
    assert ran.code == 5
    assert f"the plan needs {PLANS[name].cluster.nodes} node(s)" in ran.said
    assert ran.torchrun == []


def test_the_exit_code_of_the_program_is_the_scripts(bench: Path) -> None:
    assert run(bench, emit(PLANS["cpu node"]), CODE="17").code == 17
    assert run(bench, emit(make_plan("cuda", nodes=2)), **ALLOCATION, CODE="17").code == 17


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_job(bench: Path, number: int, code: int) -> None:
    (bench / "job.sbatch").write_text(emit(PLANS["cpu node"]))
    process = subprocess.Popen(
        ["bash", "job.sbatch"],
        cwd=bench,
        env=environment(bench, LINGER="1"),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: list(bench.glob("torchrun.*.plan")))
    process.send_signal(number)
    assert process.wait(timeout=20) == code


def test_usr1_leaves_the_script_alive(bench: Path) -> None:
    (bench / "job.sbatch").write_text(emit(PLANS["cpu node"]))
    process = subprocess.Popen(
        ["bash", "job.sbatch"],
        cwd=bench,
        env=environment(bench, LINGER="1"),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: list(bench.glob("torchrun.*.plan")))
    process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.terminate()
    assert process.wait(timeout=20) == 143


def wait_for(happened: Any, *, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(args=st.lists(HOSTILE, max_size=6))
def test_arguments_of_a_program_come_out_as_they_went_in(bench: Path, args: list[str]) -> None:
    (bench / "it's my $train.py").write_text("")
    program = UserProgram(script="it's my $train.py", args=tuple(args))
    here = run(bench, emit(PLANS["cpu node"], Job(program=program)))
    assert here.torchrun[0][-len(args) - 1 :] == [program.script, *args], here.said
    nodes = run(bench, emit(make_plan("cuda", nodes=2), Job(program=program)), **ALLOCATION)
    assert [words[-len(args) - 1 :] for words in nodes.torchrun] == [[program.script, *args]] * 2


def test_a_script_that_looks_like_an_option_is_still_a_file(bench: Path) -> None:
    (bench / "--help.py").write_text("")
    ran = run(bench, emit(PLANS["cpu node"], Job(program=UserProgram(script="--help.py"))))
    assert ran.torchrun[0][-1] == "./--help.py"


def test_a_missing_program_is_named_before_anything_starts(bench: Path) -> None:
    ran = run(bench, emit(PLANS["cpu node"], Job(program=UserProgram(script="gone.py"))))
    assert ran.code == 5
    assert "gone.py cannot be read" in ran.said
    assert ran.torchrun == []


def test_set_up_lines_run_first_and_may_use_unset_variables(bench: Path) -> None:
    job = Job(
        env_setup=("echo set-up:$NOT_SET", 'export PATH="$PATH:/nowhere"'),
        env=(("MINE", "a $b"),),
        program=UserProgram(script="t.py"),
    )
    (bench / "t.py").write_text("")
    ran = run(bench, emit(PLANS["cpu node"], job))
    assert ran.code == 0, ran.said
    assert ran.said.startswith("set-up:")
    failing = run(bench, emit(PLANS["cpu node"], Job(env_setup=("false",))))
    assert failing.code == 1
    assert failing.torchrun == []


def test_a_copied_trainer_runs_in_place_of_the_installed_one(bench: Path) -> None:
    (bench / "trainer").mkdir()
    (bench / "trainer/__main__.py").write_text("")
    ran = run(bench, emit(PLANS["cpu node"], Job(trainer_folder=f"{bench}/trainer")))
    assert ran.torchrun[0][-1] == f"{bench}/trainer/__main__.py"
    assert f"'{PLANS['cpu node'].cluster.gpus_per_node}'" not in ran.said
    assert "ready" in ran.said


SET = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE")


def test_all_ranks_get_the_same_variables(bench: Path) -> None:
    ran = run(bench, emit(on(INFINIBAND, make_plan("cuda", nodes=2))), **ALLOCATION)
    assert ran.code == 0, ran.said
    first, second = ran.environments
    assert [first[name] for name in SET] == [
        "=mlx5_0,mlx5_1,mlx5_4:1",
        "=eno1",
        "eno1",
        "2000",
    ]
    assert [second[name] for name in SET] == [first[name] for name in SET]
    assert first["TORCH_FR_DUMP_TEMP_FILE"] == f"{bench}/fsdpplan-12345.nccl-rank-"
    assert "ready n1 1.2.3 2 n1 NCCL_SOCKET_IFNAME==eno1 NCCL_IB_HCA==mlx5_0" in ran.said


def test_a_value_that_the_user_exported_wins(bench: Path) -> None:
    mine = {name: f"my {name}" for name in SET}
    plan = on(INFINIBAND, make_plan("cuda", nodes=2))
    for ran in (
        run(bench, emit(plan), **ALLOCATION, **mine),
        run(bench, emit(plan, Job(env=tuple(mine.items()))), **ALLOCATION),
    ):
        assert all(ran.environments[0][name] == value for name, value in mine.items())


def test_records_of_collectives_go_beside_the_metrics(bench: Path) -> None:
    ran = run(bench, emit(make_plan("cuda"), Job(metrics="runs/m.jsonl")))
    assert ran.environments[0]["TORCH_FR_DUMP_TEMP_FILE"] == "runs/m.jsonl.nccl-rank-"


CLOUD_SCRIPT = """\
export NCCL_NET=gIB NCCL_IB_TC="52" NCCL_LIBS="${NCCL_LIB_DIR:-none}" SEEN="$NOT_SET_ANYWHERE"
"""


def test_the_clouds_script_runs_on_each_node_and_gives_way_to_the_user(bench: Path) -> None:
    script = bench / "it's $set.sh"
    script.write_text(CLOUD_SCRIPT)
    plan = on(replace(GIB, env_profiles=(str(script),)), make_plan("cuda", nodes=2))
    ran = run(bench, emit(plan), **ALLOCATION, NCCL_IB_TC="106 or 'so'")
    assert ran.code == 0, ran.said
    for environment in ran.environments:
        assert environment["NCCL_NET"] == "gIB"
        assert environment["NCCL_IB_TC"] == "106 or 'so'"


def test_the_clouds_libraries_come_first(bench: Path) -> None:
    folder = bench / "tcpxo"
    folder.mkdir()
    script = folder / "nccl-env-profile.sh"
    script.write_text(CLOUD_SCRIPT)
    plan = on(replace(GIB, env_profiles=(str(script),)), make_plan("cuda", nodes=2))
    ran = run(bench, emit(plan), **ALLOCATION, LD_LIBRARY_PATH="/mine")
    assert ran.environments[0]["LD_LIBRARY_PATH"] == f"{folder}:/mine"
    assert ran.environments[0]["NCCL_LIBS"] == str(folder)


def test_a_clouds_script_that_is_not_there_is_missed_aloud(bench: Path) -> None:
    ran = run(bench, emit(on(GIB, make_plan("cuda", nodes=2))), **ALLOCATION)
    assert ran.code == 0
    assert f"fsdpplan: n2: {GIB.env_profiles[0]} is missing" in ran.said


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_allocation_with_an_excluded_node_is_refused(bench: Path, nodes: int) -> None:
    job = Job(exclude=("n[7-9]", "n1"))
    plan = make_plan("cuda", nodes=nodes)
    allocation = {**ALLOCATION, "SLURM_JOB_NUM_NODES": str(nodes)}
    if nodes == 1:
        allocation |= {"SLURM_JOB_NODELIST": "n1", "NODES": "n1"}
    ran = run(bench, emit(plan, job), **allocation)
    assert ran.code == 5
    assert len(ran.said.strip().splitlines()) == 1
    assert "n1, which this job excludes" in ran.said
    assert ran.torchrun == []
    assert run(bench, emit(plan, Job(exclude=("n[7-9]",))), **allocation).code == 0


def test_slurm_is_told_of_all_excluded_nodes_at_once() -> None:
    options = sbatch_options(PLANS["gpu nodes"], Job(exclude=("n03", "n[17-19]")))
    assert '--exclude="n03,n[17-19]"' in options
    assert not any("exclude" in option for option in sbatch_options(PLANS["gpu nodes"], Job()))
