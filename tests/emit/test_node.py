from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan import __version__
from fsdpplan.emit.job import Job, Trainer, UserProgram
from fsdpplan.emit.node import NODE_CHECK, program_words

ROOT = str(Path(__file__).resolve().parents[2])


def check(
    version: str = "", gpus: int = 0, head: str = "", here: str = "n1", *, cwd: str = ROOT
) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", NODE_CHECK, here, version, str(gpus), head],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_node_that_can_do_its_part_says_so() -> None:
    assert check(__version__) == (0, "fsdpplan: n1 is ready\n")


def test_another_version_of_fsdpplan_is_refused() -> None:
    code, said = check("99.0")
    assert code == 5
    assert f"fsdpplan {__version__} is installed here, fsdpplan 99.0 wrote the script" in said
    assert len(said.splitlines()) == 1


def test_too_few_gpus_are_refused() -> None:
    code, said = check(gpus=1000)
    assert code == 5
    assert "the plan uses 1000 a node" in said


def test_a_first_host_that_nobody_knows_is_refused() -> None:
    code, said = check(head="no-such-host.invalid")
    assert code == 5
    assert "cannot resolve no-such-host.invalid" in said


def test_a_first_host_that_would_be_this_node_itself_is_refused() -> None:
    code, said = check(head="localhost", here="n2")
    assert code == 5
    assert "this node itself" in said
    assert check(head="localhost", here="localhost")[0] == 0


def test_a_python_without_torch_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", NODE_CHECK, "n1", "", "0", ""],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "--env-setup" in done.stderr


def test_this_machine_knows_localhost() -> None:
    # What the test above rests on.
    assert any(info[4][0] in ("127.0.0.1", "::1") for info in socket.getaddrinfo("localhost", None))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(), "-m fsdpplan.trainer"),
        (Job(program=Trainer(steps=9, data="a b")), "-m fsdpplan.trainer --steps=9 '--data=a b'"),
        (Job(program=UserProgram(script="t.py", args=("-x", "y z"))), "t.py -x 'y z'"),
        (Job(trainer_folder="/j/trainer"), "/j/trainer/__main__.py"),
    ],
)
def test_torchrun_is_told_what_to_start(job: Job, words: str) -> None:
    assert program_words(job) == words
