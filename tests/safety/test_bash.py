"""Whatever stands in an option reaches the program as it was typed, and runs nowhere.

Arguments and variables on several nodes: tests/safety/test_targets.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fsdpplan.emit.container import Container, ContainerRuntime
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.order import Order
from fsdpplan.emit.targets import render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_plan
from tests.safety.hostile import NO_TEXT, WORDS
from tests.safety.shell import ALLOCATION, Bench, contains

PLANS = {"one node": make_plan("cpu"), "two nodes": make_plan("cpu", nodes=2)}
ALLOCATIONS = {"one node": {}, "two nodes": ALLOCATION}
NAMES = WORDS.filter(bool)
MANY = st.lists(WORDS, min_size=1, max_size=30)
FEW_RUNS = settings(
    max_examples=4,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""Each example has many strings in it, since a process costs more than a string."""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def emitted(plan: Plan, job: Job) -> str:
    return render("slurm", Order(plan=plan, plan_json=plan_json(plan), job=job, version="1.2.3"))


def variables(values: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"HOSTILE_{number}", value) for number, value in enumerate(values))


def require_untouched(bench: Bench, plan: str, job: Job, *, words: list[str]) -> None:
    """Run it; each torchrun must have got the words, and the variables of the job."""
    ran = bench.run(emitted(PLANS[plan], job), **ALLOCATIONS[plan])
    assert len(ran.words) == PLANS[plan].cluster.nodes, ran.said
    for got, environment in zip(ran.words, ran.environments, strict=True):
        assert contains(got, words), ran.said
        assert {name: environment.get(name) for name, _ in job.env} == dict(job.env)
    assert not bench.intruders


@FEW_RUNS
@given(args=MANY, values=MANY)
def test_arguments_and_variables(bench: Bench, args: list[str], values: list[str]) -> None:
    (bench.folder / "train.py").touch()
    program = UserProgram(script="train.py", args=tuple(args))
    job = Job(program=program, env=variables(values))
    require_untouched(bench, "one node", job, words=["train.py", *args])


@FEW_RUNS
@given(paths=st.lists(NAMES, min_size=4, max_size=4))
def test_paths_of_the_trainer(bench: Bench, paths: list[str]) -> None:
    checkpoints, prometheus, metrics, name = paths
    program = Trainer(checkpoint_dir=checkpoints, prometheus=prometheus)
    job = Job(program=program, metrics=metrics, env=(("NAME", name),))
    words = [f"--checkpoint-dir={checkpoints}", f"--prometheus={prometheus}"]
    require_untouched(bench, "two nodes", job, words=words)
    require_untouched(bench, "two nodes", job, words=[f"--metrics={metrics}"])


@FEW_RUNS
@given(name=WORDS.filter(lambda text: text and "/" not in text and len(text.encode()) < 200))
def test_names_of_programs(bench: Bench, name: str) -> None:
    if name in (".", ".."):
        return
    path = bench.folder / "programs" / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    script = f"programs/{name}"
    require_untouched(bench, "one node", Job(program=UserProgram(script=script)), words=[script])


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
@FEW_RUNS
@given(image=NAMES, folder=NAMES)
def test_containers(bench: Bench, runtime: ContainerRuntime, image: str, folder: str) -> None:
    (bench.folder / "train.py").touch()
    try:
        container = Container(image=f"i{image}", runtime=runtime, mounts=(f"/{folder}:/data",))
    except SpecError:
        assert {":", ","} & {*folder}
        return
    program = UserProgram(script="train.py")
    ran = bench.run(
        emitted(PLANS["two nodes"], Job(program=program, container=container)), **ALLOCATION
    )
    assert ran.words, ran.said
    if runtime == "apptainer":
        assert all(contains(words, [f"--bind=/{folder}:/data"]) for words in ran.words)
        assert all(f"i{image}" in words for words in ran.words)
    else:
        steps = [options for options in ran.steps if any("container" in each for each in options)]
        assert steps
        for options in steps:
            assert f"--container-image=i{image}" in options
            mounts = [each for each in options if each.startswith("--container-mounts=")]
            assert [each.partition("=")[2].startswith(f"/{folder}:/data,") for each in mounts] == [
                True
            ]
    assert not bench.intruders


@pytest.mark.parametrize("text", NO_TEXT)
def test_what_is_no_text_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--args"):
        UserProgram(script="t.py", args=(text,))
    with pytest.raises(SpecError, match="--script"):
        UserProgram(script=text)
    with pytest.raises(SpecError, match="--checkpoint-dir"):
        Trainer(checkpoint_dir=text)
    for name in ("job_name", "python", "metrics", "output"):
        values: dict[str, Any] = {name: text}
        with pytest.raises(SpecError):
            emitted(PLANS["one node"], Job(**values))
    with pytest.raises(SpecError, match="--env A") as refused:
        Job(env=(("A", text),))
    assert repr(text)[1:-1] not in str(refused.value)
