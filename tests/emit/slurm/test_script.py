from __future__ import annotations

import itertools
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fsdpplan.emit.container import Container
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.packed import unpacked
from fsdpplan.emit.slurm.parts import part_names, part_text
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.nodes import Network
from fsdpplan.spec.plan import Plan
from tests.emit.bench import HOSTILE, PLANS, bash_objects, emit, folder_script, shellcheck
from tests.emit.networks import networks, on

PARTS = sorted(
    file.name.removesuffix(".sh") for file in (files("fsdpplan") / "emit/bash").iterdir()
)

FULL = Job(
    program=Trainer(steps=5, data="a b.bin", checkpoint_dir="ck", checkpoint_every=2, seed=1),
    time="8:00:00",
    partition="gpu",
    account="acc",
    qos="high",
    constraint="h100&ib",
    sbatch=("--mail-type=END",),
    survival=Survival(spares=1, requeue=False),
    env_setup=("module load cuda", "source it's/activate"),
    env=(("A", "$b"), ("C", "'")),
    metrics="m.jsonl",
)


FEW = settings(max_examples=3, phases=(Phase.explicit, Phase.generate))
"""shellcheck takes longer than all else: each example has much in it."""

OWN = Job(program=UserProgram(script="t.py", args=("$x",)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("one cpu", Job()),
        ("cpu node", OWN),
        ("cpu nodes", FULL),
        ("gpu node", Job()),
        ("gpu nodes", OWN),
        ("gpu nodes", FULL),
    ],
)
def test_shellcheck_and_bash_find_nothing(name: str, job: Job) -> None:
    script = emit(PLANS[name], job)
    assert shellcheck(script) == ""
    assert bash_objects(script) == ""


OFF = Survival(retries=0, requeue=False, preflight=False)
SAVING = Trainer(checkpoint_dir="ck")
PYXIS = Container(image="i", mounts=("/a b",))
APPTAINER = Container(image="i", runtime="apptainer")


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("one cpu", Job(survival=OFF)),
        ("cpu nodes", Job(program=SAVING, time="8:00:00", container=APPTAINER)),
        ("gpu node", Job(program=SAVING, survival=OFF, container=PYXIS)),
        ("gpu nodes", Job(survival=Survival(spares=1), exclude=("n1",))),
        ("gpu nodes", Job(survival=Survival(retries=2, requeue=False, spares=1))),
    ],
)
def test_shellcheck_and_bash_find_nothing_in_one_file_or_a_folder(name: str, job: Job) -> None:
    for script in (emit(PLANS[name], job), folder_script(PLANS[name], job)):
        assert shellcheck(script) == ""
        assert bash_objects(script) == ""


@pytest.mark.parametrize("name", PARTS)
def test_shellcheck_finds_nothing_in_a_part(name: str) -> None:
    assert shellcheck(part_text(name)) == ""


def test_both_forms_have_the_same_parts_behind_a_line_that_says_what_each_does() -> None:
    saving = {"program": SAVING, "time": "8:00:00"}
    spare = Job(**saving, survival=Survival(spares=1))  # type: ignore[arg-type]
    jobs = (Job(survival=OFF), spare, Job(container=PYXIS))
    seen = {"hosts"}  # of plain hosts alone
    for job, plan in itertools.product(jobs, PLANS.values()):
        names = part_names(plan=plan, job=job)
        script, folder = emit(plan, job), folder_script(plan, job)
        for name in PARTS:
            _, purpose, text = part_text(name).split("\n", 2)
            purpose = purpose.removeprefix("# ")
            assert (f"# ---- {purpose}\n{text}" in (unpacked(script) or "")) == (name in names)
            assert (f'. "$parts/{name}.sh"' in folder) == (name in names)
        seen |= set(names)
    assert seen == set(PARTS)


@FEW
@given(network=networks())
def test_shellcheck_and_bash_find_nothing_on_any_network(network: Network) -> None:
    script = emit(on(network, PLANS["gpu nodes"]), Job(exclude=("n[01-03]", "x")))
    assert shellcheck(script) == ""
    assert bash_objects(script) == ""


@FEW
@given(words=st.lists(HOSTILE, min_size=5, max_size=20), value=HOSTILE)
def test_shellcheck_and_bash_find_nothing_with_hostile_strings(
    words: list[str], value: str
) -> None:
    job = Job(
        program=UserProgram(script=words[0] or "x", args=tuple(words)),
        env=(("HOSTILE", value),),
        env_setup=tuple(words),
        python=value or "python3",
        metrics=value,
    )
    script = emit(PLANS["cpu nodes"], job)
    assert "\r" not in script
    assert shellcheck(script) == ""
    assert bash_objects(script) == ""


@pytest.mark.parametrize("name", PLANS)
def test_every_line_of_slurm_is_static_and_comes_before_the_first_command(name: str) -> None:
    lines = emit(PLANS[name], FULL).splitlines()
    sbatch = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(sbatch) < first_command
    assert not any("$" in lines[i] for i in sbatch)


def sbatch_options(plan: Plan, job: Job) -> list[str]:
    lines = emit(plan, job).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_slurm_is_asked_for_what_the_plan_uses() -> None:
    assert sbatch_options(
        PLANS["gpu nodes"], Job(program=SAVING, time="8:00:00", signal_seconds=900)
    ) == [
        "--job-name=fsdpplan",
        "--nodes=16",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        "--gpus-per-node=4",
        "--exclusive",
        "--mem=0",
        "--time=8:00:00",
        "--output=fsdpplan-%j.out",
        "--signal=B:USR1@900",
    ]
    cpu = sbatch_options(PLANS["cpu nodes"], Job())
    assert "--cpus-per-task=2" in cpu
    assert not any("gpu" in option or "exclusive" in option for option in cpu)


def test_without_checkpoints_a_job_starts_once_and_says_so_first_of_all() -> None:
    script = emit(PLANS["gpu nodes"])
    assert "--no-requeue" in sbatch_options(PLANS["gpu nodes"], Job())
    assert "look_back" not in (unpacked(script) or "")
    trial = "20 steps on made-up tokens, without checkpoints, so it starts once"
    assert f"# Trains: {trial}\n" in script
    said = script.index(f"echo 'fsdpplan: trains {trial}' >&2")
    assert script.index("\n  enter_allocation\n") < said < script.index("\n  live\n")
    assert "made-up" not in emit(PLANS["gpu nodes"], OWN)
    full = Trainer(steps=5, data="d.bin", checkpoint_dir="ck")
    assert "echo 'fsdpplan: trains" not in emit(PLANS["gpu nodes"], Job(program=full))


def test_spare_nodes_are_asked_for_with_the_others_and_outlive_them() -> None:
    job = Job(survival=Survival(spares=2, requeue=False), reservation="r", constraint="h100&ib")
    options = sbatch_options(PLANS["gpu nodes"], job)
    assert {"--nodes=18", "--no-kill", "--no-requeue"} < set(options)
    assert {"--reservation=r", '--constraint="h100&ib"'} < set(options)
    assert "--no-kill" not in sbatch_options(PLANS["gpu nodes"], Job())


def test_cores_given_take_the_place_of_whole_nodes() -> None:
    options = sbatch_options(PLANS["gpu nodes"], Job(cpus_per_task=32))
    assert "--cpus-per-task=32" in options
    assert "--exclusive" not in options


def test_gpus_may_be_asked_for_by_gres() -> None:
    options = sbatch_options(PLANS["gpu nodes"], Job(sbatch=("--gres=gpu:h100:4",)))
    assert "--gres=gpu:h100:4" in options
    assert not any(option.startswith("--gpus-per-node") for option in options)


@pytest.mark.parametrize("memory", ["--mem=100G", "--mem-per-cpu=4G", "--mem-per-gpu=64G"])
def test_memory_that_was_asked_for_takes_the_place_of_all(memory: str) -> None:
    options = sbatch_options(PLANS["gpu nodes"], Job(sbatch=(memory,)))
    assert [option for option in options if "mem" in option] == [memory]
    assert "--exclusive" in options


@pytest.mark.parametrize(
    "name", ["job_name", "partition", "account", "qos", "reservation", "constraint", "output"]
)
def test_a_line_break_in_a_value_of_slurm_is_refused(name: str) -> None:
    values: dict[str, Any] = {name: "a\n#SBATCH --nodes=99"}
    with pytest.raises(SpecError, match=name.replace("_", ".")):
        emit(PLANS["cpu node"], Job(**values))


def test_options_without_a_meaning_are_refused() -> None:
    with pytest.raises(SpecError, match="gloo"):
        emit(PLANS["cpu node"], Job(nccl_debug="INFO"))
    with pytest.raises(SpecError, match="free port"):
        emit(PLANS["gpu node"], Job(port=29500))


def test_no_script_falls_back_to_localhost_on_several_nodes() -> None:
    script = emit(PLANS["gpu nodes"])
    assert "localhost" not in script
    assert "refuse" in script.splitlines()[-2]


def test_slurm_is_told_of_all_excluded_nodes_at_once() -> None:
    options = sbatch_options(PLANS["gpu nodes"], Job(exclude=("n03", "n[17-19]")))
    assert '--exclude="n03,n[17-19]"' in options
    assert not any("exclude" in option for option in sbatch_options(PLANS["gpu nodes"], Job()))
