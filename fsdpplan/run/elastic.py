"""Elastic: what a checkpoint says of the run that wrote it, for a plan that goes on from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.probe import require_torch

OPTIONS = {"eps": "adam_eps", "betas": "", "groups": "param_group", "optimizer": "", "adamw": ""}
"""Part of a recorded recipe -> the trainer's option, where they differ; empty: it has none of its
own here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run stands by its newest checkpoint, and how it goes on."""

    folder: Path
    step: int
    steps: int
    """Of the whole training, under the batch of the plan that goes on."""
    steps_before: int
    """As the checkpoint says."""
    saved_bytes: int | None
    """Of its files; None where it has no manifest."""
    program: Trainer
    """The options with which it goes on, as far as the checkpoint says them."""
    said: tuple[str, ...]
    """What is otherwise from there on, as the trainer will say it."""


def standing(folder: Path, plan: Plan) -> Standing:
    """How `plan` goes on from the newest checkpoint of `folder`: its recipe, over as many tokens.

    Raises SpecError where there is none, or the trainer would refuse it whatever the options.
    """
    require_torch("reading where a checkpoint stands")
    from fsdpplan.trainer.checkpoint.files import read_manifest, resumable
    from fsdpplan.trainer.checkpoint.progress import read_progress, resumed_otherwise
    from fsdpplan.trainer.config import parse_plan
    from fsdpplan.trainer.errors import TrainerError
    from fsdpplan.trainer.options import parse_options

    try:
        paths = resumable(folder)
        if not paths:
            raise SpecError(
                f"{folder} has no checkpoint: name the --checkpoint-dir of the run, or leave it out"
            )
        found, parsed = read_progress(paths[0]), parse_plan(plan_json(plan))
        records = read_manifest(paths[0])
        steps = _steps(found.step, found.steps, found.layout, plan)
        program = _program(found, parsed, steps=steps)
        program = replace(program, checkpoint_dir=str(folder))

        def otherwise(allowed: bool) -> list[str]:
            recipe = parse_options(program.words()).recipe(parsed)
            return resumed_otherwise(folder, parsed, recipe, seed=found.seed, allowed=allowed)

        said = otherwise(True)
        try:
            otherwise(False)
        except TrainerError:
            program = replace(program, allow_changes=True)
    except TrainerError as error:
        raise SpecError(str(error)) from error
    return Standing(
        folder=folder,
        step=found.step,
        steps=steps,
        steps_before=found.steps,
        saved_bytes=None if records is None else sum(one.num_bytes for one in records),
        program=program,
        said=tuple(said),
    )


def _steps(step: int, steps: int, layout: dict[str, Any], plan: Plan) -> int:
    """Steps in all for as many tokens as were planned: those that are left cover what is left."""
    parts = ("dp_replicate", "dp_shard", "micro_batch", "num_microbatches")
    batch = 1
    for name in parts:
        batch *= layout.get(name, 0)
    if batch in (0, plan.training.global_batch):
        return steps
    return step + -(-max(0, steps - step) * batch // plan.training.global_batch)


def _program(found: Any, parsed: Any, *, steps: int) -> Trainer:
    """The options that make the recipe of a checkpoint: what the trainer takes by itself is left
    out."""
    from fsdpplan.trainer.checkpoint.progress import recorded
    from fsdpplan.trainer.options import parse_options

    base = Trainer(steps=steps, learning_rate=found.learning_rate, seed=found.seed or None)
    taken = recorded(parse_options(base.words()).recipe(parsed))
    told = found.recipe or {"warmup_steps": found.warmup_steps}
    values: dict[str, Any] = {}
    for name, value in told.items():
        if name in ("steps", "learning_rate") or value is None or value == taken.get(name):
            continue
        if name == "betas":
            values |= {"adam_beta1": value[0], "adam_beta2": value[1]}
        elif name == "groups":
            values["param_group"] = tuple(value)
        elif OPTIONS.get(name, name):
            values[OPTIONS.get(name, name)] = value
    return replace(base, **values)
