from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan import __version__
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import Target
from fsdpplan.emit.trainer_program import Trainer
from tests.emit.bench import shellcheck
from tests.emit.kubernetes.orders import IMAGE, PLANS, TARGETS, documents, full_order, order
from tests.emit.networks import GIB, on
from tests.emit.plans import make_plan
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_SECONDS = 250

PAIR = make_plan("cpu", nodes=2, per_node=1)
STARTED: list[subprocess.Popen[str]] = []
READY = "the ranks are ready"
TOLD = {
    "kubernetes": {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "1"},
    "pytorchjob": {"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    "jobset": {"JOB_COMPLETION_INDEX": "1"},
    "volcano": {"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
}
"""What each operator tells a pod."""


def script(target: Target, given: Order) -> str:
    text = documents(target, given)[0]["data"]["start.sh"]
    assert isinstance(text, str)
    return text


Pod = subprocess.Popen[str]


@pytest.fixture(autouse=True)
def _no_pod_outlives_its_test() -> Iterator[None]:
    STARTED.clear()
    yield
    for pod in STARTED:
        if pod.poll() is None:
            os.killpg(pod.pid, signal.SIGKILL)
        pod.communicate()


def started(text: str, folder: Path, **environment: str) -> Pod:
    """A pod's program, with a folder of its own for what is the pod's own."""
    folder.mkdir(exist_ok=True)
    (folder / "start.sh").write_text(text)
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "FSDPPLAN_NUMBERS")
        if name in os.environ
    }
    pod = subprocess.Popen(
        ["bash", str(folder / "start.sh")],
        env={**kept, "TMPDIR": str(folder), **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    STARTED.append(pod)
    return pod


def read_until(pod: Pod, words: str) -> None:
    assert pod.stdout is not None
    said = []
    for line in pod.stdout:
        said.append(line)
        if words in line:
            return
    raise AssertionError("".join(said))


def ended(pod: Pod) -> tuple[int, str]:
    """(exit code, what it has still printed)."""
    out, _ = pod.communicate(timeout=TIMEOUT_SECONDS)
    return pod.returncode, out


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "stand_in.py").read_text())
    path.chmod(0o755)
    return str(path)


def scripts() -> list[str]:
    """Of each kind of job, and of all plans and options in one of them."""
    theirs = UserProgram(script="-train it's.py", args=("$(touch x)", "--lr=1"))
    pods = Pods(image=IMAGE, volumes=("m:/m",))
    job = Job(program=theirs, metrics="/m/a b")
    plain = (order(plan) for plan in PLANS.values())
    wild = order(on(GIB, PLANS["gpu pods"]), job=job, pods=pods)
    found = [script("kubernetes", given) for given in (*plain, wild)]
    return found + [script(target, full_order(target)) for target in TARGETS]


def test_shellcheck_finds_nothing() -> None:
    for text in dict.fromkeys(scripts()):
        assert shellcheck(text) == ""


@pytest.mark.parametrize("target", TARGETS)
def test_torchrun_learns_what_the_operator_has_told_the_pod(
    target: Target, tmp_path: Path, stand_in: str
) -> None:
    text = script(target, order(PLANS["cpu pods"], job=Job(python=stand_in)))
    if target == "jobset":
        assert "head=fsdpplan-node-0-0.fsdpplan" in text
        text = text.replace("fsdpplan-node-0-0.fsdpplan", "localhost")
    code, said = ended(started(text, tmp_path / "pod", RANK_DOES="end", **TOLD[target]))
    assert code == 0, said
    (words,) = [line.split() for line in said.splitlines() if line.startswith("torchrun ")]
    port = "29500" if target == "jobset" else "1"
    assert {
        "--nnodes=2",
        "--nproc-per-node=2",
        "--node-rank=1",
        "--master-addr=localhost",
        f"--master-port={port}",
        "fsdpplan.trainer",
    } <= {*words}


@pytest.mark.parametrize("target", TARGETS)
def test_a_pod_without_its_operator_says_so(target: Target, tmp_path: Path, stand_in: str) -> None:
    text = script(target, order(PLANS["cpu pods"], job=Job(python=stand_in)))
    code, said = ended(started(text, tmp_path / "pod"))
    assert code == 5
    assert "no operator has said which pod of the job this is" in said


@pytest.mark.parametrize(
    ("does", "number", "code"),
    [
        ("end", None, 0),
        ("fail", None, 1),
        ("stop with the others", None, 143),
        ("wait", signal.SIGTERM, 143),
        ("wait", signal.SIGUSR1, 0),
    ],
)
def test_an_end_before_the_last_step_starts_the_job_again_unless_it_was_asked_for(
    does: str, number: int | None, code: int, tmp_path: Path, stand_in: str
) -> None:
    text = script("jobset", order(PLANS["gpu pod"], job=Job(python=stand_in)))
    pod = started(text, tmp_path / "pod", RANK_DOES=does)
    read_until(pod, READY)
    if number is not None:
        pod.send_signal(number)
    found, said = ended(pod)
    assert found == code, said
    assert '{"event": "summary"}' in said
    noted = tmp_path / "pod/fsdpplan/stopped"
    sent = {signal.SIGTERM: "12", signal.SIGUSR1: "10"}.get(number or 0)
    assert sent is None or noted.read_text().strip() == sent


def test_a_program_of_the_users_is_ended_by_torchrun(tmp_path: Path, stand_in: str) -> None:
    job = Job(program=UserProgram(script="train.py"), python=stand_in)
    pod = started(script("jobset", order(PLANS["gpu pod"], job=job)), tmp_path, RANK_DOES="wait")
    read_until(pod, READY)
    pod.terminate()
    code, said = ended(pod)
    assert code == 143, said
    assert not (tmp_path / "fsdpplan/stopped").exists()


@pytest.mark.parametrize("program", [Trainer(), UserProgram(script="train.py")])
def test_usr1_reaches_ranks_that_have_no_handler_yet(
    program: Trainer | UserProgram, tmp_path: Path, stand_in: str
) -> None:
    job = Job(program=program, python=stand_in)
    text = script("jobset", order(PLANS["gpu pod"], job=job))
    pod = started(text, tmp_path, RANK_DOES="take its time")
    read_until(pod, READY)
    pod.send_signal(signal.SIGUSR1)
    code, said = ended(pod)
    assert code == 0, said
    assert (tmp_path / "fsdpplan/stopped").read_text().strip() == "10"


def test_metrics_on_a_volume_are_printed_by_the_first_pod_alone(
    tmp_path: Path, stand_in: str
) -> None:
    job = Job(python=stand_in, metrics=f"{tmp_path}/shared/m.jsonl")
    pods = Pods(image=IMAGE, volumes=(f"shared:{tmp_path}/shared",))
    text = script("pytorchjob", order(PLANS["cpu pods"], job=job, pods=pods))
    printed = []
    for index in ("0", "1"):
        told = {**TOLD["pytorchjob"], "RANK": index, "RANK_DOES": "end"}
        code, said = ended(started(text, tmp_path / index, **told))
        assert code == 0, said
        printed.append('{"event": "summary"}' in said)
    assert printed == [True, False]


def two_pods(given: Order, folder: Path) -> list[Pod]:
    """The pods of a TrainJob, as its operator tells them of each other."""
    told = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
        "FSDPPLAN_PLAN": given.plan_json,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    text = script("kubernetes", given)
    return [
        started(text, folder / f"pod{index}", PET_NODE_RANK=str(index), **told) for index in (0, 1)
    ]


@pytest.mark.gloo
def test_pods_train_save_and_start_again_where_they_were(tmp_path: Path) -> None:
    job = Job(
        program=Trainer(steps=1_000_000, checkpoint_dir=f"{tmp_path}/ckpt"), python=sys.executable
    )
    pods = Pods(image=IMAGE, volumes=(f"ckpt:{tmp_path}",))
    given = replace(order(PAIR, job=job, pods=pods), version=__version__)
    first = two_pods(given, tmp_path)
    read_until(first[0], '"event": "step"')
    # A node is drained: one pod is told, and all save.
    first[1].terminate()
    codes = [ended(pod) for pod in first]
    assert [code for code, _ in codes] == [143, 143], codes

    again = two_pods(given, tmp_path)
    read_until(again[0], '"event": "step"')
    # The first pod is told to save and leave for good.
    again[0].send_signal(signal.SIGUSR1)
    codes = [ended(pod) for pod in again]
    assert [code for code, _ in codes] == [0, 0], codes
    metrics = (tmp_path / "pod0/fsdpplan/metrics.jsonl").read_text().splitlines()
    starts = [line for line in map(json.loads, metrics) if line["event"] == "start"]
    assert starts[-1]["step"] > 0
