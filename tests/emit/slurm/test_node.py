from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.slurm.node import program_words
from fsdpplan.emit.slurm.parts import part_text
from fsdpplan.emit.trainer_program import Trainer
from tests.emit.bench import ALLOCATION, emit, run
from tests.emit.plans import make_plan


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(), "-m fsdpplan.trainer"),
        (Job(program=Trainer(steps=9, data="a b")), "-m fsdpplan.trainer --steps=9 '--data=a b'"),
        (Job(program=UserProgram(script="t.py", args=("-x", "y z"))), "t.py -x 'y z'"),
        (Job(folder="/j"), '"$FSDPPLAN_JOB_FOLDER/trainer/__main__.py"'),
    ],
)
def test_torchrun_is_told_what_to_start(job: Job, words: str) -> None:
    assert program_words(job) == words


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("exit_code", "binds"), [("0", True), ("1", False)])
def test_ranks_are_bound_where_the_node_says_that_it_can(
    bench: Path, nodes: int, exit_code: str, binds: bool
) -> None:
    allocation = ALLOCATION if nodes > 1 else {}
    script = emit(make_plan("cuda", nodes=nodes, per_node=8))
    ran = run(bench, script, NEAR=exit_code, **allocation)
    assert ran.code == 0, ran.said
    assert len(ran.torchrun) == nodes
    for words in ran.torchrun:
        assert ("--numa-binding=node" in words) is binds


@pytest.mark.parametrize(
    ("code", "knows", "said"),
    [(0, False, False), (1, True, False), (1, False, True)],
    ids=["all is well", "another fault", "the name is gone"],
)
def test_a_name_that_stops_resolving_is_a_sentence(
    code: int, knows: bool, said: bool, tmp_path: Path
) -> None:
    getent = tmp_path / "getent"
    getent.write_text(f"#!/bin/sh\nexit {0 if knows else 2}\n")
    getent.chmod(0o755)
    part, call = part_text("ranks"), "say_if_head_is_gone"
    script = "\n".join(["set -eu", part, f"code={code} here=n2", call, "echo on"])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FSDPPLAN_HEAD": "n1"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "on\n"
    sentence = "fsdpplan: n2: cannot resolve n1, the first host, any more: mend the name service"
    assert done.stderr.startswith(sentence) if said else done.stderr == ""
