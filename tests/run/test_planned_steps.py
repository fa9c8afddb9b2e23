"""The number of optimizer steps of a job has one source, at whatever it is launched."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import Target
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.run.folder import write_job_folder
from fsdpplan.run.known import with_best_interval
from fsdpplan.run.launch import emit_script, launch_text
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.trainer_options import STEPS
from tests.emit.doors.orders import SAYABLE
from tests.emit.plans import make_plan

TARGETS = get_args(Target)
OURS = [name for name in TARGETS if name not in ("torchtitan", "megatron", "accelerate")]
KUBERNETES = ("kubernetes", "pytorchjob", "jobset", "volcano")


def plan_for(target: Target) -> Plan:
    """A plan that the target can say."""
    plan = make_plan("cuda", nodes=2, per_node=4, **SAYABLE.get(target, {}))
    device = replace(plan.cluster.device, skypilot_name="H100")
    return replace(plan, cluster=replace(plan.cluster, device=device))


TINY = plan_for("slurm")


def with_steps(plan: Plan, steps: int) -> Plan:
    """The plan, of tokens that fill its last step by half."""
    training = plan.training
    tokens = training.tokens_per_step * steps - training.tokens_per_step // 2
    return replace(plan, training=replace(training, tokens=tokens))


def emitted(target: Target, plan: Plan, program: Trainer) -> str:
    pods = Pods(image="image") if target in KUBERNETES else None
    return launch_text(target, plan=plan, job=Job(program=program), pods=pods)


def steps_in(target: Target, text: str) -> set[int]:
    """The numbers of steps that the trainer is told in a script."""
    pattern = {
        "torchtitan": r"^ +steps=([0-9]+),",
        "megatron": r"--train-iters'?[ \\\n]+'?([0-9]+)",
        "accelerate": r"# +([0-9]+) steps$",
    }.get(target, r"--steps=([0-9]+)")
    return {int(number) for number in re.findall(pattern, text, re.MULTILINE)}


@pytest.mark.parametrize("target", TARGETS)
def test_the_job_trains_the_tokens_of_its_plan_at_every_target(target: Target) -> None:
    plan = with_steps(plan_for(target), 23_842)
    assert plan.training.steps == 23_842
    assert steps_in(target, emitted(target, plan, Trainer())) == {23_842}
    if target != "accelerate":  # whose script is the user's
        assert steps_in(target, emitted(target, plan, Trainer(steps=7))) == {7}


def test_a_job_folder_trains_as_the_script_alone(tmp_path: Path) -> None:
    plan = with_steps(make_plan(), 321)
    packed = replace(plan, training=replace(plan.training, packed=True, mean_document_tokens=20))
    write_job_folder(tmp_path / "job", plan=packed, job=Job())
    script = (tmp_path / "job" / "job.sbatch").read_text()
    assert steps_in("slurm", script) == {321}
    assert "--pack" in script
    assert "Trains: 321 steps on made-up tokens" in script


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "accelerate"])
def test_data_without_a_number_of_steps_is_asked_about(target: Target) -> None:
    if target in OURS:
        with pytest.raises(SpecError, match=r"how far to train .* add --steps"):
            emitted(target, TINY, Trainer(data="corpus"))
        planned = emitted(target, with_steps(TINY, 9), Trainer(data="corpus"))
        assert steps_in(target, planned) == {9}
        assert steps_in(target, emitted(target, TINY, Trainer(data="corpus", steps=5))) == {5}
    elif target == "megatron":
        assert steps_in(target, emitted(target, plan_for(target), Trainer())) == {STEPS}


def test_a_trial_on_made_up_tokens_keeps_its_steps() -> None:
    script = emit_script(TINY, Job())
    assert steps_in("slurm", script) == set()
    assert f"Trains: {STEPS} steps on made-up tokens" in script


def test_options_are_held_to_the_steps_of_the_plan() -> None:
    wsd = Trainer(lr_schedule="wsd", warmup_steps=100, decay_steps=50, profile="300:3")
    emit_script(with_steps(TINY, 400), Job(program=wsd))
    with pytest.raises(SpecError, match="ends after the last step, 20"):
        emit_script(TINY, Job(program=replace(wsd, warmup_steps=1, decay_steps=1)))
    with pytest.raises(SpecError, match="are more than the 120 steps"):
        emit_script(with_steps(TINY, 120), Job(program=replace(wsd, profile=None)))
    with pytest.raises(SpecError, match="are more than the 20 steps"):
        emit_script(TINY, Job(program=replace(wsd, profile=None)))


def test_a_job_as_long_as_its_plan_saves_on_its_way() -> None:
    saving = Job(program=Trainer(checkpoint_dir="/shared/ck"))
    assert with_best_interval(saving, TINY)[1] == ""
    job, why = with_best_interval(saving, with_steps(TINY, 10**8))
    assert isinstance(job.program, Trainer)
    assert job.program.checkpoint_every
    assert why
