"""The container file is sound as far as that can be seen without building it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass

import pytest

from fsdpplan.spec.training import NEWEST_TESTED, OLDEST, release_of_image
from tests.packages import ROOT, claimed_pythons, project

KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD", "ENV"}


@dataclass(frozen=True)
class Step:
    stage: str
    word: str
    rest: str


def steps() -> list[Step]:
    """Instructions, each with the stage that it is in."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found, stage = [], ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.partition(" AS ")[2]
        found.append(Step(stage, word, rest))
    return found


def of(stage: str, word: str) -> list[str]:
    return [step.rest for step in steps() if (step.stage, step.word) == (stage, word)]


def bases() -> dict[str, str]:
    return dict(rest.split("=", 1) for rest in of("", "ARG"))


def test_it_is_of_known_instructions_in_known_stages() -> None:
    assert {step.word for step in steps()} <= KNOWN
    stages = [step.stage for step in steps() if step.word == "FROM"]
    assert stages == ["build", "planner", "job"]
    named = {
        base
        for step in steps()
        if step.word == "FROM"
        for base in re.findall(r"{(\w+)}", step.rest)
    }
    assert named == bases().keys()


def test_bases_are_pinned_to_a_claimed_python_and_a_tested_torch() -> None:
    name, _, tag = bases()["PLANNER_BASE"].partition(":")
    assert name == "python"
    assert tag.partition("-")[0] == claimed_pythons()[-1]
    release = release_of_image(bases()["JOB_BASE"])
    assert release is not None
    assert OLDEST <= release <= NEWEST_TESTED


@pytest.mark.parametrize("copied", [(s.stage, s.rest) for s in steps() if s.word == "COPY"])
def test_what_is_copied_is_there(copied: tuple[str, str]) -> None:
    stage, rest = copied
    words = rest.split()
    if words[0].startswith("--from="):
        before = [step.stage for step in steps() if step.word == "FROM"]
        assert before.index(words[0].removeprefix("--from=")) < before.index(stage)
        return
    assert all((ROOT / word).exists() for word in words[:-1])


def test_the_wheel_has_all_that_it_is_built_from() -> None:
    copied = {word for rest in of("build", "COPY") for word in rest.split()[:-1]}
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert {"pyproject.toml", project()["readme"], *project()["license-files"]} <= copied
    assert {"fsdpplan", "hardware_profiles"} <= copied
    assert '"hardware_profiles" = ' in table


def test_no_image_installs_a_torch_of_its_own() -> None:
    """Neither has the extra that brings one: a job keeps that of its base."""
    for stage in ("planner", "job"):
        (line,) = (rest for rest in of(stage, "RUN") if "pip install" in rest)
        assert "/dist/*.whl" in line
        assert "torch" not in line
    assert not [name for name in project()["dependencies"] if name.startswith("torch")]


def test_the_planner_is_nobody_special_and_runs_the_program() -> None:
    assert of("planner", "USER") == ["planner"]
    assert "useradd --create-home --uid 1000 planner" in " ".join(of("planner", "RUN"))
    (entry,) = of("planner", "ENTRYPOINT")
    assert json.loads(entry) == list(project()["scripts"])
    words = [step.word for step in steps() if step.stage == "planner"]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")


@pytest.mark.parametrize("stage", ["build", "planner", "job"])
def test_each_line_that_runs_is_bash(stage: str) -> None:
    for line in of(stage, "RUN"):
        done = subprocess.run(
            ["bash", "-n", "-c", line], capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        assert not re.search(r"\[\w+\]", line.replace('["', "")), "no extras are asked for"
