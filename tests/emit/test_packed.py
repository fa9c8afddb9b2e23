"""What a script of one file carries: it is short, and its parts are read by what it says."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fsdpplan.emit.container import Container
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.order import Order
from fsdpplan.emit.packed import packed_lines, unpacked
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.slurm.header import job_plan
from fsdpplan.emit.slurm.parts import part_names, part_text
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.targets import Target, render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import carried_json
from fsdpplan.spec.nodes import Network
from fsdpplan.spec.plan import Plan
from tests.emit.bench import folder_script
from tests.emit.networks import networks, on
from tests.emit.plans import make_plan

TRAINER = Trainer(checkpoint_dir="ck", steps=1000, data="d.bin", checkpoint_every=100)
OWN = UserProgram(script="train.py", args=("-x", "y z"))
MUCH: dict[str, Any] = {
    "time": "8:00:00",
    "signal_seconds": 600,
    "partition": "p",
    "account": "a",
    "qos": "q",
    "survival": Survival(spares=1, preflight=True),
    "exclude": ("n[1-9]",),
    "env_setup": ("module load cuda",),
}
LONGEST = 200


def text_of(target: Target, plan: Plan, job: Job) -> str:
    pods = Pods(image="i") if target == "kubernetes" else Pods()
    given = carried_json(job_plan(plan))
    return render(target, Order(plan=plan, plan_json=given, job=job, version="1.2.3", pods=pods))


@settings(max_examples=20, phases=(Phase.explicit, Phase.generate))
@given(
    network=networks(),
    program=st.sampled_from([TRAINER, OWN]),
    container=st.sampled_from(
        [None, Container(image="i", mounts=("/a",)), Container(image="i", runtime="apptainer")]
    ),
)
def test_it_is_read_in_two_minutes_whatever_the_plan(
    network: Network, program: Trainer | UserProgram, container: Container | None
) -> None:
    plan = on(network, make_plan("cuda", nodes=8, per_node=8))
    much = Job(program=program, container=container, **MUCH)
    assert text_of("slurm", plan, much).count("\n") <= LONGEST
    if program is TRAINER:
        assert folder_script(plan, much).count("\n") <= LONGEST
    assert text_of("ssh", plan, Job(program=program)).count("\n") <= LONGEST
    with suppress(SpecError):  # a cloud's script, which Ray cannot run first
        assert text_of("ray", plan, Job(program=program)).count("\n") <= LONGEST


@pytest.mark.parametrize("target", ["slurm", "ssh", "kubernetes"])
def test_the_command_that_it_says_prints_its_parts(target: Target, tmp_path: Path) -> None:
    plan = make_plan("cuda", nodes=2, per_node=8)
    script = text_of(target, plan, Job())
    (tmp_path / "THIS_FILE").write_text(script)
    read = re.search(r"^ *#   (sed .* THIS_FILE .*)$", script, re.M)
    assert read
    shown = subprocess.run(
        ["bash", "-c", read[1]], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    names = part_names(plan=plan, job=Job()) if target == "slurm" else ("check",)
    for name in names:
        assert part_text(name).split("\n", 2)[2] in shown
        assert f"# {name}: " in script
    assert "def look(words" in shown


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")))
def test_what_was_packed_comes_out(text: str) -> None:
    assert unpacked("\n".join(packed_lines(text, contents=[]))) == text
    assert unpacked(text) is None


@pytest.mark.parametrize("change", [lambda row: row[:-9], lambda row: row[:40] + "AA" + row[42:]])
def test_a_script_that_was_cut_off_or_changed_runs_nothing(change: Any, tmp_path: Path) -> None:
    lines = packed_lines("echo ran", contents=[])
    at = next(i for i, line in enumerate(lines) if line.startswith("packed()")) + 1
    lines[at] = change(lines[at])
    script = 'refuse() { echo "$*" >&2; exit 5; }\nset -euo pipefail\n' + "\n".join(lines)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "")
    assert "emit it again" in done.stderr
