from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.run.follow import nccl_watch
from fsdpplan.run.follow.nccl_watch import NcclWatch, nccl_variables, uses_nccl
from fsdpplan.run.launch import Launch, emit_script
from fsdpplan.run.outcome import Manner, Outcome
from fsdpplan.run.session import run_launch
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_plan
from tests.run.displays import Remembers

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings/nccl"
SOCKETS = RECORDINGS / "2.30-sockets-no-adapter.log"
FINE = RECORDINGS / "2.30-roce-fused.log"
THROUGH_HOST = RECORDINGS / "2.23-roce-through-host.log"

GOES_ON = "for n in {1..3000}; do sleep 0.1; done"
WAITS = f"trap 'echo told >told; exit 130' INT; {GOES_ON}"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watch, "LOOK_SECONDS", 0.05)
    for name in [name for name in os.environ if name.startswith("NCCL_DEBUG")]:
        monkeypatch.delenv(name)


def plan_over(level: str, *, gpudirect: bool = True) -> Plan:
    plan = make_plan("cuda", nodes=2)
    inside, between = plan.cluster.levels
    levels = (inside, replace(between, name=level, gpudirect=gpudirect))
    return replace(plan, cluster=replace(plan.cluster, levels=levels))


ROCE = plan_over("roce")


def writes(recording: Path, host: str = "n01") -> str:
    """Shell lines that write as NCCL would, below the file that the environment asks for."""
    into = f'"${{NCCL_DEBUG_FILE//%h.%p/{host}.7}}"'
    return f"cat {recording} >{into}"


def run(
    folder: Path, script: str, *, plan: Plan = ROCE, allow_sockets: bool = False
) -> tuple[Outcome, Remembers]:
    display = Remembers()
    outcome = run_launch(
        Launch(script=script, plan=plan, origin="a test"),
        folder=folder,
        target="here",
        display=display,
        manner=Manner(allow_sockets=allow_sockets),
    )
    return outcome, display


def test_a_job_over_sockets_is_ended_as_by_an_interrupt(tmp_path: Path) -> None:
    outcome, display = run(tmp_path, f"{writes(SOCKETS)}\n{WAITS}")
    assert outcome.exit_code == 5
    assert outcome.ended
    assert outcome.stopped is not None
    assert "between n01 and n02 over sockets" in outcome.stopped
    assert "--allow-sockets" in outcome.stopped
    assert "\n" not in outcome.stopped
    assert (tmp_path / "told").read_text() == "told\n"
    assert f"ending the job: {outcome.stopped}" in display.states


def test_only_this_job_is_ended(tmp_path: Path) -> None:
    other = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
    try:
        run(tmp_path, f"{writes(SOCKETS)}\n{WAITS}")
        assert os.waitpid(other, os.WNOHANG) == (0, 0)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def test_a_job_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpplan.run.engines.local.STOP_SECONDS", 0.5)
    outcome, _ = run(tmp_path, f"{writes(SOCKETS)}\ntrap '' INT TERM\n{GOES_ON}")
    assert outcome.exit_code == 5


def test_sockets_that_were_allowed_are_a_warning(tmp_path: Path) -> None:
    script = f"{writes(SOCKETS)}\nsleep 0.5"
    outcome, display = run(tmp_path, script, allow_sockets=True)
    assert (outcome.exit_code, outcome.stopped) == (0, None)
    assert len(outcome.warnings) == 1
    assert display.states[1:] == [f"warning: {outcome.warnings[0]}"]


def test_sockets_are_fine_where_there_is_only_ethernet(tmp_path: Path) -> None:
    plan = plan_over("ethernet", gpudirect=False)
    outcome, display = run(tmp_path, f"{writes(SOCKETS)}\nsleep 0.3", plan=plan)
    assert (outcome.exit_code, outcome.stopped, outcome.warnings) == (0, None, ())
    assert outcome.nccl is not None
    assert outcome.nccl.networks == ("Socket",)
    assert len(display.states) == 1


def test_the_report_of_a_good_job_is_kept(tmp_path: Path) -> None:
    outcome, display = run(tmp_path, writes(FINE))
    assert (outcome.exit_code, outcome.stopped, outcome.warnings) == (0, None, ())
    assert outcome.nccl is not None
    assert outcome.nccl.versions == ("2.30.7",)
    assert {one.transport for one in outcome.nccl.between} == {"NET/IB"}
    assert len(display.states) == 1
    assert list(outcome.run_folder.glob("nccl.*.log"))


def test_host_memory_in_the_way_is_a_warning_and_no_stop(tmp_path: Path) -> None:
    step = "echo '{\"step\": 1}' >>$FSDPPLAN_METRICS; sleep 0.5"
    outcome, display = run(tmp_path, f"{writes(THROUGH_HOST)}\n{step}")
    assert (outcome.exit_code, outcome.stopped) == (0, None)
    assert "GPUDirect" in outcome.warnings[0]
    assert sum("GPUDirect" in state for state in display.states) == 1


def test_a_job_that_ended_by_itself_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_watch, "LOOK_SECONDS", 60.0)
    outcome, _ = run(tmp_path, f"sleep 0.3; {writes(SOCKETS)}; exit 3")
    assert (outcome.exit_code, outcome.stopped) == (3, None)
    assert len(outcome.warnings) == 1


def test_nccl_is_told_where_to_write_and_how_much(tmp_path: Path) -> None:
    (tmp_path / "a 100% b").mkdir()
    _, display = run(tmp_path / "a 100% b", "env | grep ^NCCL_ | sort")
    debug, path, subsystems = display.lines
    assert debug == "NCCL_DEBUG=INFO"
    assert subsystems == "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET"
    assert "/a 100%% b/fsdpplan-runs/" in path
    assert path.endswith("/nccl.%h.%p.log")


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"])
def test_a_log_that_the_user_asked_for_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    assert nccl_variables(script="", environment={}, folder=tmp_path)
    assert not nccl_variables(script="", environment={name: "x"}, folder=tmp_path)
    assert not nccl_variables(script=f"export {name}=x", environment={}, folder=tmp_path)


@pytest.mark.parametrize(
    ("job", "own"),
    [
        (Job(), False),
        (Job(nccl_debug="WARN"), True),
        (Job(env=(("NCCL_DEBUG", "INFO"),)), True),
        (Job(env_setup=("export NCCL_DEBUG=INFO",)), True),
        (Job(env=(("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "x"),)), False),
    ],
)
def test_scripts_with_a_log_of_their_own_are_known(job: Job, own: bool, tmp_path: Path) -> None:
    # A script for several nodes sets them itself.
    script = emit_script(make_plan("cuda"), job)
    assert nccl_variables(script=script, environment={}, folder=tmp_path).keys() == (
        set() if own else {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}
    )


def test_a_log_of_the_users_own_is_read_from_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    outcome, _ = run(tmp_path, f"cat {SOCKETS}\n{WAITS}")
    assert outcome.exit_code == 5
    assert not list(outcome.run_folder.glob("nccl.*.log"))


def test_cpu_processes_and_a_single_gpu_do_without(tmp_path: Path) -> None:
    assert not uses_nccl(make_plan("cpu", nodes=2))
    assert not uses_nccl(make_plan("cuda", per_node=1))
    program = UserProgram(script=str(tmp_path / "own.py"))
    (tmp_path / "own.py").write_text("")
    plan = make_plan("cpu", per_node=1)
    script = emit_script(plan, Job(program=program))
    outcome, _ = run(tmp_path, f"env | grep ^NCCL_DEBUG\n{script}", plan=plan)
    assert outcome.nccl is None


def test_files_that_appear_while_it_looks_are_read_from_their_beginning(tmp_path: Path) -> None:
    watch = NcclWatch(folder=tmp_path, plan=ROCE)
    watch.poll(steps=0, ended=True)
    assert watch.report is None
    lines = SOCKETS.read_text().splitlines(keepends=True)
    for host in ("n01", "n02"):
        (tmp_path / f"nccl.{host}.1.log").write_text(
            "".join(line for line in lines if line.startswith(host))
        )
    time.sleep(nccl_watch.LOOK_SECONDS)
    watch.poll(steps=0)
    assert watch.verdict is not None


def test_after_the_first_steps_the_files_are_left_alone_until_the_end(tmp_path: Path) -> None:
    watch = NcclWatch(folder=tmp_path, plan=ROCE)
    watch.poll(steps=2)
    (tmp_path / "nccl.n01.1.log").write_text(SOCKETS.read_text())
    time.sleep(nccl_watch.LOOK_SECONDS)
    watch.poll(steps=3)
    assert watch.report is None
    watch.poll(steps=9, ended=True)
    assert watch.verdict is None
    assert len(watch.warnings) == 1
