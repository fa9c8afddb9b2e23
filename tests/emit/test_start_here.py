from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.slurm.header import plan_digest
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.files.plans import plan_json
from tests.emit.bench import (
    ALLOCATION,
    HOSTILE,
    JOB_FOLDER,
    PLANS,
    emit,
    emit_folder,
    environment,
    run,
    wait_for,
)
from tests.emit.plans import make_plan


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


def test_the_exit_code_of_the_program_is_the_scripts(bench: Path) -> None:
    assert run(bench, emit(PLANS["cpu node"]), CODE="17").code == 17
    assert run(bench, emit(make_plan("cuda", nodes=2)), **ALLOCATION, CODE="17").code == 17


def lingering(bench: Path) -> subprocess.Popen[bytes]:
    """The script, whose torchrun has started and takes its time. A shell cannot trap what was
    ignored when it began, as SIGINT is behind a test that runs in the background."""
    process = subprocess.Popen(
        ["env", "--default-signal=INT", "bash", "job.sbatch"],
        cwd=bench,
        env=environment(bench, LINGER="1"),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: list(bench.glob("torchrun.*.plan")))
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_job(bench: Path, number: int, code: int) -> None:
    (bench / "job.sbatch").write_text(emit(PLANS["cpu node"]))
    process = lingering(bench)
    process.send_signal(number)
    assert process.wait(timeout=120) == code


def test_usr1_leaves_the_script_alive(bench: Path) -> None:
    (bench / "job.sbatch").write_text(emit(PLANS["cpu node"]))
    process = lingering(bench)
    process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.terminate()
    assert process.wait(timeout=120) == 143


LATE = """
import pathlib, signal, sys, time
pathlib.Path("up").touch()
time.sleep(2)
def leave(number, frame):
    with open("heard", "a") as heard:
        heard.write(f"{number} ")
    time.sleep(3)
    sys.exit(0)
signal.signal(signal.SIGUSR1, leave)
while True:
    time.sleep(60)
"""
"""A rank that takes its time before it has a handler, and then before it leaves."""


@pytest.mark.parametrize("is_before", [False, True], ids=["while it starts", "before it starts"])
def test_usr1_reaches_ranks_once_that_have_no_handler_yet(bench: Path, is_before: bool) -> None:
    script = emit(PLANS["cpu node"])
    if is_before:
        script = script.replace("  start_ranks 1 2 &", "  kill -USR1 $$\n  start_ranks 1 2 &", 1)
    (bench / "job.sbatch").write_text(script)
    (bench / "late.py").write_text(LATE)
    process = subprocess.Popen(
        ["bash", "job.sbatch"],
        cwd=bench,
        env=environment(bench, DO=f"{sys.executable} late.py & wait"),
        start_new_session=True,
    )
    wait_for(lambda: (bench / "up").exists())
    if not is_before:
        process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=120) == 0
    assert (bench / "heard").read_text() == f"{int(signal.SIGUSR1)} "


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(args=st.lists(HOSTILE, min_size=5, max_size=20))
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
    ran = run(bench, emit_folder(bench, PLANS["cpu node"], Job(program=Trainer(steps=3))))
    assert ran.torchrun[0][-2:] == [f"{bench}/{JOB_FOLDER}/trainer/__main__.py", "--steps=3"]
    assert [plan_digest(text) for text in ran.plans] == [plan_digest(plan_json(PLANS["cpu node"]))]
    assert "ready" in ran.said


def test_a_job_folder_that_was_moved_or_changed_is_refused_in_one_line(bench: Path) -> None:
    said = Trainer(steps=5, data="d.bin", checkpoint_dir="ck")
    script = emit_folder(bench, PLANS["cpu node"], Job(program=said))
    plan = bench / JOB_FOLDER / "fsdpplan.json"
    plan.write_text(plan.read_text().replace("1", "2"))
    changed = run(bench, script)
    (bench / JOB_FOLDER / "trainer/__main__.py").unlink()
    plan.write_text(plan_json(PLANS["cpu node"]))
    unseen = run(bench, script)
    plan.unlink()
    gone = run(bench, script)
    for ran, says in (
        (changed, "fsdpplan.json was changed: emit the folder again"),
        (unseen, "put the job folder where every node sees it"),
        (gone, "after moving it"),
    ):
        assert (ran.code, ran.torchrun) == (5, [])
        assert len(ran.said.strip().splitlines()) == 1
        assert says in ran.said
