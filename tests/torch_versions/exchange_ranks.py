"""What the ranks of exchange.py run: `write FOLDER`, or `read FOLDER...`; rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fsdpplan.trainer.checkpoint.progress import Progress
from fsdpplan.trainer.checkpoint.runs import Checkpoints
from fsdpplan.trainer.config import PlanConfig, load_plan
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.parallel.assemble import Assembled, assemble
from fsdpplan.trainer.parallel.distributed import leave
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from fsdpplan.trainer.torch_versions import quiet

PLAN = Path(__file__).parent / "plan.json"
CPU = torch.device("cpu")
SAVED_AT = 2
STEPS = 4
RECIPE = Recipe(steps=STEPS, learning_rate=3e-3, warmup_steps=0, weight_decay=0.1, clip_norm=0.5)


def lose(
    plan: PlanConfig, assembled: Assembled, optimizer: torch.optim.Optimizer, *, step: int
) -> float:
    """The loss of a step."""
    first = step * plan.training.global_batch
    sequences = open_sequences(plan, None, seed=0)
    batches = micro_batches(sequences, plan, first=first, rank=dist.get_rank(), device=CPU)
    output = train_step(assembled, optimizer, batches, plan, clip_norm=RECIPE.clip_norm)
    loss = output.loss.clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def write(folder: Path) -> list[float]:
    """Save after SAVED_AT steps and go on; the losses after that."""
    plan = load_plan(PLAN)
    assembled = assemble(plan, CPU, seed=0)
    optimizer = make_optimizer(assembled.model, RECIPE)
    checkpoints = Checkpoints(folder, plan, keep=1, background=False)
    checkpoints.begin(assembled.model, optimizer, seed=0, resume="never")
    for step in range(SAVED_AT):
        lose(plan, assembled, optimizer, step=step)
    progress = Progress(
        step=SAVED_AT,
        sequences=SAVED_AT * plan.training.global_batch,
        seed=0,
        seq_len=plan.training.seq_len,
        steps=STEPS,
        learning_rate=RECIPE.learning_rate,
        warmup_steps=RECIPE.warmup_steps,
    )
    checkpoints.save(assembled.model, optimizer, progress)
    saved = checkpoints.wait()
    assert saved is not None
    assert not saved.problem, saved.problem
    return [lose(plan, assembled, optimizer, step=step) for step in range(SAVED_AT, STEPS)]


def read(folder: Path) -> list[float]:
    """The losses after the step at which another torch saved."""
    plan = load_plan(PLAN)
    assembled = assemble(plan, CPU, seed=1)
    optimizer = make_optimizer(assembled.model, RECIPE)
    checkpoints = Checkpoints(folder, plan, keep=1, background=False)
    progress, _ = checkpoints.begin(assembled.model, optimizer, seed=0, resume="required")
    assert progress is not None
    return [lose(plan, assembled, optimizer, step=step) for step in range(progress.step, STEPS)]


def main(what: str, *folders: str) -> None:
    """Do `what` to each folder in turn."""
    quiet()
    run = {"write": write, "read": read}[what]
    results = {folder: run(Path(folder)) for folder in folders}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
