"""Layouts that the numerical preflight must find right: of all that the trainer's tests run."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import PreflightFailed, TrainerError
from fsdpplan.trainer.parallel.support import require_runnable
from fsdpplan.trainer.preflight.program import Preflight
from tests.trainer import (
    adapter_layouts,
    expert_layouts,
    jobs,
    loss_layouts,
    losses,
    matrix_layouts,
    parallel_layouts,
    pipeline_layouts,
    plans,
    precision_layouts,
)

SAMPLE = {2: 1, 4: 2}
"""World -> layouts that continuous integration tries; `make numbers` tries all."""
SAMPLE_SEED = 12
WORLDS = (2, 3, 4, 6, 8)
AT_ONCE = 16
"""Layouts of one set of processes, which has a time limit."""
SECONDS = 60.0
"""On a busy machine."""

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16_reduced_in_bf16": {"precision": "bf16", "reduce_dtype": "bf16"},
    "bf16_kept_in_bf16": {"precision": "bf16", "param_dtype": "bf16", "reduce_dtype": "bf16"},
    "fp16": {"precision": "fp16"},
    "muon": {"optimizer": "muon"},
}


def named_plans(world: int) -> dict[str, str]:
    """Name -> plan of every layout of so many ranks."""
    return dict(_named(world))


def _named(world: int) -> Iterator[tuple[str, str]]:
    dense, with_experts = matrix_layouts.OF_WORLD.get(world, ({}, {}))
    mixture = matrix_layouts.FOUR_HEADS | matrix_layouts.EXPERTS
    for name, layout in dense.items():
        yield (
            f"matrix {name}",
            plans.plan_text(model=matrix_layouts.dense_model(world), **layout),
        )
    for name, layout in with_experts.items():
        yield f"matrix {name}", plans.plan_text(model=mixture, **layout)
    for model, layouts in pipeline_layouts.FP32.get(world, {}).items():
        for name, layout in layouts.items():
            fields = pipeline_layouts.MODELS[model]
            yield f"pipeline {name}", plans.plan_text(model=fields, **layout)
    for which, cases in parallel_layouts.SETS.items():
        if which.endswith(f"_{world}"):
            for name in cases:
                yield f"{which} {name}", json.dumps(parallel_layouts.document(which, name))
    for name, case in adapter_layouts.LAYOUTS.get(world, {}).items():
        yield f"adapters {name}", adapter_layouts.plan_text(case)
        yield f"adapters bf16 {name}", adapter_layouts.plan_text(case, precision="bf16")
    if world == 4:
        yield from _of_four()


def _of_four() -> Iterator[tuple[str, str]]:
    for name, layout in losses.FP32.items():
        yield f"losses {name}", plans.plan_text(**layout)
    for name, layout in losses.GPT2.items():
        yield f"losses {name}", plans.plan_text(model=plans.GPT2_STYLE, **layout)
    for name in expert_layouts.LAYOUTS:
        yield f"experts {name}", plans.plan_text(**expert_layouts.plan_arguments(name))
    for name in loss_layouts.CHUNKED:
        layout = loss_layouts.LAYOUTS[name] | loss_layouts.CHUNKS
        yield f"chunks {name}", plans.plan_text(model=loss_layouts.MODEL, **layout)
    for name, (shapes, layout) in loss_layouts.PADDED_LAYOUTS.items():
        yield f"padded {name}", plans.plan_text(model=shapes, **loss_layouts.CHUNKS | layout)
    for name, layout in loss_layouts.TIED_LAYOUTS.items():
        yield f"chunks {name}", plans.plan_text(model=loss_layouts.TIED, **layout)
    for form, training in FORMATS.items():
        for name, layout in precision_layouts.LAYOUTS.items():
            model = precision_layouts.DENSE
            yield (
                f"{form} {name}",
                plans.plan_text(model=model, training=training, **layout),
            )
        for name, layout in precision_layouts.EXPERTS.items():
            model = precision_layouts.MIXTURE
            yield (
                f"{form} {name}",
                plans.plan_text(model=model, training=training, **layout),
            )


def sample(world: int) -> dict[str, str]:
    """Some of them, the same each time."""
    every = named_plans(world)
    chosen = random.Random(SAMPLE_SEED).sample(sorted(every), SAMPLE[world])
    return {name: every[name] for name in chosen}


def tried(plan: PlanConfig) -> dict[str, Any]:
    """What the numerical preflight says of a plan: its sentence, if any, and how far it is off."""
    one = Preflight(
        plan=plan,
        folder=None,
        seconds=SECONDS,
        rank=dist.get_rank(),
        world=plan.layout.world,
        cluster=False,
    )
    try:
        one.run()
    except PreflightFailed as failed:
        return {"problem": str(failed), **one.result.get("numbers", {})}
    return {"problem": "", **one.result.get("numbers", {})}


def try_sample(out: Path) -> None:
    """Some of them; rank 0 writes the results."""
    _try(sample, out)


def try_all(out: Path) -> None:
    """Those with the numbers $FIRST, $FIRST + $STEP ..."""
    first, step = int(os.environ["FIRST"]), int(os.environ["STEP"])
    _try(lambda world: dict(sorted(named_plans(world).items())[first::step]), out)


def _try(chosen: Callable[[int], dict[str, str]], out: Path) -> None:
    dist.init_process_group("gloo")
    of = {name: parse_plan(text) for name, text in chosen(dist.get_world_size()).items()}
    jobs.leave_with({name: tried(plan) for name, plan in of.items() if runs(plan)}, out)


def runs(plan: PlanConfig) -> bool:
    """Whether this torch runs it: an old one refuses some, in words."""
    try:
        require_runnable(plan)
    except TrainerError:
        return False
    return True


def main() -> int:
    """Try every layout of every world, and say which are blamed."""
    blamed = tried_plans = 0
    with TemporaryDirectory() as folder:
        for world in WORLDS:
            step = -(-len(named_plans(world)) // AT_ONCE)
            for first in range(step):
                found = jobs.measured(
                    world,
                    "tests.trainer.numbers_layouts:try_all",
                    Path(folder) / "found.json",
                    FIRST=str(first),
                    STEP=str(step),
                )
                tried_plans += len(found)
                for name, result in found.items():
                    if result["problem"]:
                        blamed += 1
                        print(f"{name}: {result['problem']}", flush=True)
            print(f"{world} ranks: {tried_plans} layouts so far, {blamed} blamed", flush=True)
    return min(blamed, 1)


if __name__ == "__main__":
    sys.exit(main())
