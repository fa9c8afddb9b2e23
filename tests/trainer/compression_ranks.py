"""What each rank of the tests of compressed gradients runs: DDP with torch's PowerSGD hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import jobs, losses, plans

RECIPE = replace(losses.RECIPE, steps=4)
FIRST = 2
MODEL = {"vocab": 64}
KINDS = {
    "none": {},
    "bf16": {"gradient_compression": "bf16", "reduce_dtype": "bf16"},
    "powersgd": {"gradient_compression": f"powersgd:2:{FIRST}"},
    "powersgd_whole": {"gradient_compression": "powersgd:2:100"},
}
LAYOUT = {"dp_replicate": 2, "sharding": "ddp"}


def train(text: str) -> dict[str, Any]:
    """Losses, and what the last step's hooks sent, in bytes: of real DDP over gloo."""
    plan = parse_plan(text)
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    results: dict[str, Any] = {"losses": [], "sent": []}
    for step in range(RECIPE.steps):
        batches = micro_batches(
            sequences,
            plan,
            first=step * plan.training.global_batch,
            rank=dist.get_rank(),
            device=losses.CPU,
        )
        sent: list[int] = []
        output = counted(
            sent,
            lambda batches=batches: train_step(
                assembled, optimizer, batches, plan, clip_norm=RECIPE.clip_norm
            ),
        )
        loss = output.loss.clone()
        dist.all_reduce(loss)
        results["losses"].append(loss.item() / dist.get_world_size())
        results["sent"].append(sent)
    return results


def counted(sent: list[int], call: Callable[[], Any]) -> Any:
    """Call, and note the bytes of each asynchronous all-reduce, which are the hooks': they come
    from several threads."""
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **named: Any) -> Any:
        if named.get("async_op"):
            sent.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **named)

    dist.all_reduce = all_reduce
    try:
        return call()
    finally:
        dist.all_reduce = original


def measure_compression(out: Path) -> None:
    """All kinds, one after the other."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    results = {
        name: train(plans.plan_text(model=MODEL, training=training, **LAYOUT))
        for name, training in KINDS.items()
    }
    jobs.leave_with(results, out)
