"""The script for plain hosts: what it starts where, and that nothing outlives it.

`ssh` is a program that runs the command here; the hosts are addresses of a network namespace.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.emit.job import UserProgram
from fsdpplan.emit.targets import render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from tests.emit.bench import shellcheck
from tests.emit.doors.orders import make_order
from tests.emit.plans import make_plan

SSH = """#!/bin/bash
while [ "$1" != -- ]; do shift; done
printf '%s\\n' "$2" >>"$SSH_LOG"
shift 2
exec bash -c "$*"
"""

PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then exit 0; fi
printf '%s|' "$HOSTNAME" "$FSDPPLAN_HEAD" "${FSDPPLAN_PLAN:0:1}" "$PWD" "$@"; echo
case "$HOSTNAME" in
  *fails) exit 7 ;;
  *waits) echo $$ >"$WAITING"; exec sleep 300 ;;
esac
"""

WHO_AM_I = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"])
"""
"""What torchrun tells a rank after all of them have met."""


class Hosts:
    """A folder with the script, a pretended ssh and a pretended Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "ssh.log"
        self.waiting = folder / "waiting"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("ssh", SSH), ("fake-python", PYTHON)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
            "SSH_LOG": str(self.log),
            "WAITING": str(self.waiting),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def write(self, nodes: int = 2, **job: Any) -> Path:
        plan = make_plan("cpu", nodes=nodes, per_node=1, dp_shard=1)
        given = {"python": "fake-python", "program": UserProgram(script="train.py"), **job}
        (self.folder / "train.py").touch()
        script = self.folder / "my job.sh"
        script.write_text(render("ssh", make_order(plan, **given)))
        return script

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "my job.sh", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_every_host_gets_its_part(hosts: Hosts) -> None:
    hosts.write(program=UserProgram(script="train.py", args=("$(x)", "a b")), port=4000)
    done = hosts.run("h1", "me@h2")
    assert done.returncode == 0, done.stderr
    assert sorted(hosts.log.read_text().split()) == ["h1", "me@h2"]
    lines = sorted(done.stdout.splitlines())
    for rank, (host, line) in enumerate(zip(("h1", "h2"), lines, strict=True)):
        words = line.partition(": ")[2].split("|")[:-1]
        assert words[:4] == [host, "h1", "{", str(hosts.folder)]
        assert words[4:] == [
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={rank}",
            "--master-addr=h1",
            "--master-port=4000",
            "train.py",
            "$(x)",
            "a b",
        ]


def test_one_host_can_be_started_by_hand(hosts: Hosts) -> None:
    hosts.write()
    done = hosts.run("--on", "h2", "h1", "h2")
    assert "--node-rank=1" in done.stdout
    assert not hosts.log.exists()


def test_a_host_that_fails_ends_the_others(hosts: Hosts) -> None:
    hosts.write()
    done = hosts.run("waits", "fails")
    assert done.returncode == 7
    require_ended(hosts)


def test_an_interrupt_ends_all_hosts(hosts: Hosts) -> None:
    hosts.write(nodes=1)
    running = subprocess.Popen(
        ["bash", "my job.sh", "waits"],
        cwd=hosts.folder,
        env=hosts.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert "waits" in running.stdout.readline()
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 143
    running.stdout.close()
    require_ended(hosts)


def require_ended(hosts: Hosts) -> None:
    """The process that waited is gone, or was never started."""
    if not hosts.waiting.exists() or not (text := hosts.waiting.read_text().strip()):
        return
    tail = shutil.which("tail")
    assert tail is not None
    subprocess.run([tail, f"--pid={text}", "-f", "/dev/null"], check=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the plan is for 2 host(s), and 0 are named"),
        (("h1",), "and 1 are named"),
        (("--on", "h3", "h1", "h2"), "h3 is none of h1 h2"),
        (("--help",), "--help is no option of this script"),
    ],
)
def test_wrong_hosts_are_refused(hosts: Hosts, words: tuple[str, ...], said: str) -> None:
    hosts.write()
    done = hosts.run(*words)
    assert done.returncode == 5
    assert said in done.stderr


def test_a_folder_that_a_host_has_not_is_named(hosts: Hosts) -> None:
    hosts.write()
    done = hosts.run("--hung-up", "/not/there", "h1", "h1", "h2")
    assert done.returncode == 5
    assert "/not/there is not on h1" in done.stderr


def test_the_head_says_what_to_type(hosts: Hosts) -> None:
    text = hosts.write().read_text()
    assert "#   bash THIS_FILE HOST1 HOST2\n" in text
    assert "#   bash THIS_FILE --on HOST2 HOST1 HOST2\n" in text


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_shellcheck_finds_nothing(kind: Any) -> None:
    trainer = Trainer(steps=3, checkpoint_dir="it's $HOME")
    order = make_order(
        make_plan(kind, nodes=2, per_node=4), program=trainer, metrics="~/m", env=(("A", "`b`"),)
    )
    assert shellcheck(render("ssh", order)) == ""


@pytest.mark.parametrize(
    ("job", "flag"), [({"time": "10"}, "--time"), ({"job_name": "x"}, "--job-name")]
)
def test_options_without_a_meaning_are_refused(job: dict[str, Any], flag: str) -> None:
    with pytest.raises(SpecError, match=f"{flag} has no meaning for --target ssh"):
        render("ssh", make_order(**job))


def test_ranks_of_two_hosts_meet(hosts: Hosts) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    hosts.write(python=sys.executable)
    (hosts.folder / "train.py").write_text(WHO_AM_I)
    network = (
        "ip link set lo up && ip addr add 10.77.0.1/32 dev lo && ip addr add 10.77.0.2/32 dev lo"
    )
    done = subprocess.run(
        [*namespace, "bash", "-c", f"{network} && bash 'my job.sh' 10.77.0.1 10.77.0.2"],
        cwd=hosts.folder,
        env=hosts.environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10.77.0.1: rank 0 of 2 at 10.77.0.1" in done.stdout
    assert "10.77.0.2: rank 1 of 2 at 10.77.0.1" in done.stdout
