"""NCCL's verdict where nobody but `sbatch` has started the job."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.slurm.parts import part_names, part_text
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.run.follow import nccl_watch
from fsdpplan.run.follow.nccl_watch import host_memory_warning, socket_sentence
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.read.nccl_report import (
    LIBFABRIC_NETWORKS,
    SOCKET_NETWORKS,
    SOCKET_PROVIDERS,
)
from tests.emit.bench import ALLOCATION, Ran, emit, exported, run, with_parts
from tests.emit.plans import make_plan
from tests.topology.nccl_logs import read_nccl_log

RECORDINGS = sorted((Path(__file__).resolve().parents[2] / "recordings/nccl").glob("*.log"))
SOCKETS = RECORDINGS[0].with_name("2.30-sockets-no-adapter.log")
FINE = RECORDINGS[0].with_name("2.30-roce-fused.log")


def plan_over(level: str, *, gpudirect: bool = True) -> Plan:
    plan = make_plan("cuda", nodes=2)
    inside, between = plan.cluster.levels
    levels = (inside, replace(between, name=level, gpudirect=gpudirect))
    return replace(plan, cluster=replace(plan.cluster, levels=levels))


ROCE = plan_over("roce")


def in_part(folder: Path, lines: str, **values: str) -> subprocess.CompletedProcess[str]:
    """The part with lines behind it, in a folder of a run."""
    text = f"set -euo pipefail\n{part_text('signals')}\n{part_text('nccl')}\n{lines}"
    return subprocess.run(
        ["bash", "-c", text],
        env={"PATH": "/usr/bin:/bin", "FSDPPLAN_RUN_FOLDER": str(folder), **values},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_it_judges_a_log_as_run_does(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "nccl.n01.7.log").write_bytes(recording.read_bytes())
    values = {"adapters": "there are some", "gpudirect": "yes"}
    done = in_part(tmp_path, 'judge_nccl "$(nccl_ways)"', **values)
    report = read_nccl_log(recording.read_text().splitlines())
    sockets = socket_sentence(report, plan=ROCE, folder=tmp_path)
    slow = host_memory_warning(report, plan=ROCE)
    assert done.returncode == (0 if sockets is None else 1), done.stderr
    assert ("over sockets although there are some" in done.stderr) == (sockets is not None)
    assert ("host memory" in done.stderr) == (slow is not None)
    over_network = [one for one in report.connections if one.network is not None]
    assert ("NCCL connects nodes by" in done.stderr) == bool(over_network)


def test_nccl_is_told_where_to_write_as_by_run(tmp_path: Path) -> None:
    folder = tmp_path / "a 100% b"
    folder.mkdir()
    done = in_part(folder, "log_nccl; env -0")
    (tmp_path / "env").write_text(done.stdout)
    said = {name: value for name, value in exported(tmp_path / "env").items() if "NCCL" in name}
    assert said == nccl_watch.nccl_variables(script="", environment={}, folder=folder)


ADAPTERS = ("IB", "IB/GDRDMA", "FasTrak", "SHARP")
WAYS = {
    **{f"3 {name}": True for name in SOCKET_NETWORKS},
    **{f"3 {name}": False for name in (*ADAPTERS, *LIBFABRIC_NETWORKS)},
    **{
        f"3 {name}\n1 provider {provider}": provider in SOCKET_PROVIDERS
        for name in LIBFABRIC_NETWORKS
        for provider in (*SOCKET_PROVIDERS, "efa", "verbs")
    },
}
"""What the part has gathered, and whether those names are sockets to `run` and to the trainer."""


@pytest.mark.parametrize(("ways", "sockets"), sorted(WAYS.items()))
def test_the_names_that_are_sockets_are_those_of_run(
    ways: str, sockets: bool, tmp_path: Path
) -> None:
    done = in_part(tmp_path, f"are_sockets {shlex.quote(ways)} || exit 1")
    assert done.returncode == (0 if sockets else 1), done.stderr


def test_it_heeds_the_variable_by_which_run_allows_sockets(tmp_path: Path) -> None:
    lines = "judge_nccl '3 Socket'"
    values = {"adapters": "there are some", "gpudirect": ""}
    assert in_part(tmp_path, lines, **values).returncode == 1
    allowed = in_part(tmp_path, lines, **values, **{nccl_watch.ALLOWS_SOCKETS: "1"})
    assert allowed.returncode == 0


def watched(
    folder: Path, job: str, *, judges: str = "", tells: str = ""
) -> tuple[str, str, list[str]]:
    """The exit code of a job whose watcher finds sockets, why the job was stopped, and who judged;
    `judges` and `tells` are what else the watcher does in these moments."""
    part = part_text("nccl").replace("sleep 10 ", "sleep 0.05 ")
    lines = f"""
        {part}
        cd "$FSDPPLAN_RUN_FOLDER"
        log_nccl() {{ :; }}
        nccl_ways() {{ echo '3 Socket'; }}
        judge_nccl() {{ echo "$BASHPID" >>judged; {judges or ":"}; return 1; }}
        kill() {{ builtin kill "$@"; case $1 in -USR2) {tells or ":"} ;; esac; }}
        watch_nccl
        ({job}) &
        follow
        echo "$code $stopped"
    """
    done = in_part(folder, lines)
    assert done.returncode == 0, done.stderr
    assert "Terminated" not in done.stderr
    code, _, stopped = done.stdout.strip().partition(" ")
    return code, stopped, (folder / "judged").read_text().split()


def test_a_watcher_that_takes_long_to_end_is_not_judged_after(tmp_path: Path) -> None:
    code, stopped, judged_by = watched(tmp_path, "exec sleep 3000", tells="sleep 1")
    assert (code, stopped) == ("143", "5")
    assert len(judged_by) == 1


def test_a_job_that_ends_while_the_watcher_judges_keeps_its_exit_code(tmp_path: Path) -> None:
    job = "until [ -e judged ]; do sleep 0.05; done; exit 17"
    until_ended = 'until [ -n "$over" ]; do sleep 0.05; done'
    code, stopped, judged_by = watched(tmp_path, job, judges=until_ended)
    assert (code, stopped) == ("17", "")
    assert len(judged_by) == 1


def test_a_start_that_is_over_before_its_watcher_was_there_is_judged(tmp_path: Path) -> None:
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, _, judged_by = watched(folder, "exit 0")
        assert len(judged_by) == 1


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"])
def test_a_log_that_somebody_asked_for_stays_as_it_is(name: str, tmp_path: Path) -> None:
    done = in_part(tmp_path, "log_nccl; env", **{name: "x"})
    assert [line for line in done.stdout.splitlines() if "NCCL_" in line] == [f"{name}=x"]


def has_part(plan: Plan, job: Job) -> bool:
    return "nccl" in part_names(plan=plan, job=job)


def test_it_is_absent_where_there_is_nothing_to_judge() -> None:
    assert has_part(ROCE, Job())
    assert not has_part(make_plan("cuda"), Job())
    assert not has_part(make_plan("cpu", nodes=2), Job())
    assert not has_part(ROCE, Job(nccl_debug="INFO"))
    assert not has_part(ROCE, Job(env=(("NCCL_DEBUG_FILE", "mine"),)))


def judged(bench: Path, recording: Path, *, plan: Plan = ROCE, then: str, **values: str) -> Ran:
    """A job whose first node logs what was recorded."""
    job = Job(program=Trainer(steps=5, data="d", checkpoint_dir="ck"))
    script = with_parts(emit(plan, job), "sleep 10 ", "sleep 0.2 ")
    log = f"cat {recording} >$FSDPPLAN_RUN_FOLDER/nccl.n1.7.log"
    do = f"[ $SLURMD_NODENAME != n1 ] || {{ sleep 0.1; {log}; }}; {then}"
    return run(bench, script, **ALLOCATION, DO=do, **values)


def test_sockets_beside_adapters_end_a_bare_job(bench: Path) -> None:
    until_ended = "until grep -q attempt_ended $FSDPPLAN_RUN_FOLDER/attempts.jsonl"
    ran = judged(bench, SOCKETS, then=f"{until_ended}; do sleep 0.1; done")
    assert ran.code == 5
    assert "over sockets although the plan counts on 1 roce port a node" in ran.said
    assert [note["next"] for note in ran.notes if note["event"] == "attempt_ended"] == ["end"]


def test_where_run_judges_or_sockets_are_allowed_it_is_only_said(bench: Path) -> None:
    ran = judged(bench, SOCKETS, then="sleep 1", FSDPPLAN_ALLOW_SOCKETS="1")
    assert ran.code == 0
    assert ran.said.count("over sockets although") == 1


def test_sockets_are_fine_where_there_is_only_ethernet(bench: Path) -> None:
    plan = plan_over("ethernet", gpudirect=False)
    ran = judged(bench, SOCKETS, plan=plan, then="sleep 1")
    assert ran.code == 0
    assert "NCCL connects nodes by Socket (4)" in ran.said
    assert "although" not in ran.said


@pytest.mark.parametrize("then", ["sleep 1.5", "true"], ids=["seen", "over before a look"])
def test_how_nodes_are_connected_is_said_once(bench: Path, then: str) -> None:
    ran = judged(bench, FINE, then=then)
    assert ran.code == 0, ran.said
    assert ran.said.count("NCCL connects nodes by IB/GDRDMA (2)") == 1
    assert "Terminated" not in ran.said


def test_what_an_earlier_start_has_left_does_not_count(bench: Path) -> None:
    (bench / "run").mkdir()
    (bench / "run/nccl.n1.3.log").write_bytes(SOCKETS.read_bytes())
    ran = judged(bench, FINE, then="sleep 1")
    assert ran.code == 0, ran.said
    assert "Socket" not in ran.said
