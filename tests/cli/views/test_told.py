"""What is said on stderr breaks on a terminal, stays one line in a pipe, and can be pasted."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cli.views.render import broken, tell

LONG = (
    "there is no plan nothing.json: type fsdpplan recommend --params 8e9 --gpus 8 first, which "
    "saves one, or name another"
)


def test_lines_are_no_wider_than_the_terminal() -> None:
    lines = broken(f"fsdpplan: {LONG}", 60).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize(
    ("sentence", "command"),
    [
        (LONG, "fsdpplan recommend --params 8e9 --gpus 8"),
        (
            "no profile has the GPUs of this machine: type `fsdpplan profiles --kind node`",
            "fsdpplan profiles --kind node",
        ),
        ("measuring 4 nodes needs an allocation: type salloc --nodes=4, then", "salloc --nodes=4"),
        ("torch 2.7 is too old for it: pip install 'torch>=2.8', or take", "'torch>=2.8'"),
        ("a batch of 9 does not split over 8 ranks; use --global-batch 8, or", "--global-batch 8"),
        (
            "fsdpplan cannot run here: fsdpplan cancel --job 20260101-120000",
            "--job 20260101-120000",
        ),
        ("a node in it may be bad: sbatch --exclude=node1 job.sbatch", "sbatch --exclude=node1"),
        ("use another, such as kubectl get pods", "kubectl get"),
        ("saved as a.json; next: fsdpplan emit-launch > job.sbatch, or", "launch > job.sbatch"),
        ("it goes on: fsdpplan emit-launch a.json > b.sh", "fsdpplan emit-launch a.json > b.sh"),
    ],
)
def test_a_command_stays_in_one_piece(sentence: str, command: str) -> None:
    for columns in range(40, 81):
        assert command in broken(f"fsdpplan: {sentence}", columns)


WORDS = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=12)


@given(st.lists(WORDS, min_size=1, max_size=60), st.integers(40, 80))
def test_no_word_is_lost_or_cut(words: list[str], columns: int) -> None:
    assert broken(" ".join(words), columns).split() == words


def test_in_a_pipe_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tell(f"{LONG} \x1b[31m")
    assert capsys.readouterr().err == f"fsdpplan: {LONG} \\x1b[31m\n"


@pytest.mark.parametrize("columns", [50, 200])
def test_on_a_terminal_it_has_the_width_of_the_terminal(columns: int, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    words = [sys.executable, "-m", "fsdpplan", "explain", "nothing.json"]
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        ended = subprocess.run(words, stderr=theirs, cwd=tmp_path, check=False, timeout=120)
        os.close(theirs)
        said = terminal.read(4096).decode().replace("\r\n", "\n")
    said = said.rpartition("\r")[2]  # behind what a busy machine was at, and took away
    assert ended.returncode == 2
    lines = said.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= min(columns, 100)
    assert " ".join(said.split()) == f"fsdpplan: {LONG}"
