"""What real ranks call in a step: the layouts that rehearsals are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpplan.trainer.clip import clip_gradients
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.parallel.data_parallel import gradient_sync
from fsdpplan.trainer.parallel.mesh import build_meshes
from fsdpplan.trainer.parallel.parallelize import parallelize
from fsdpplan.trainer.rehearse.counting import CollectiveCounter, layout_axes
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from fsdpplan.trainer.user.pipeline import forward_backward
from tests.trainer import jobs, plans
from tests.trainer.matrix_layouts import EXPERTS, PIPED, SPLIT, WHOLE

RECIPE = Recipe(steps=2, learning_rate=1e-3, warmup_steps=0, weight_decay=0.1, clip_norm=0.5)
CPU = torch.device("cpu")
SHARDED = {"dp_shard": 4}
COPIED = {"dp_replicate": 4, "sharding": "ddp"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": SHARDED,
    "sharded, kept": SHARDED | {"reshard_after_forward": "never", "num_microbatches": 2},
    "sharded, by pairs": {"dp_replicate": 2, "dp_shard": 2, "activation_checkpointing": "full"},
    "sharded, integer": SHARDED | {"reshard_after_forward": 2},
    "copied": COPIED,
    "copied, small buckets": COPIED
    | {"ddp_bucket_bytes": 20_000, "num_microbatches": 2, "gradient_sync": "last"},
    "split": SPLIT | {"dp_shard": 2},
    "split, recomputed": SPLIT | {"dp_replicate": 2, "activation_checkpointing": "op"},
    "piped": PIPED | {"dp_shard": 2},
    "piped, interleaved": PIPED
    | {"dp_shard": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    "split and piped": SPLIT | PIPED,
    "context": {"cp": 2, "dp_shard": 2},
    "context and split": {"cp": 2} | SPLIT,
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"ep": 2, "dp_shard": 4},
    "experts and pipe": {"ep": 2, "dp_shard": 2} | PIPED,
}
OWN: dict[str, dict[str, Any]] = {
    "own, copied": COPIED,
    "own, copied, small buckets": LAYOUTS["copied, small buckets"],
    "own, one replica split": WHOLE | SPLIT | {"tp": 4},
    "own, one replica piped": WHOLE | PIPED | {"pp": 4, "num_microbatches": 4},
    "own, replicas piped": WHOLE | PIPED | {"dp_replicate": 2},
}
"""Whole parameters of a model that is not the plan's."""


class OwnBlock(nn.Module):
    """Two products beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(torch.tanh(self.up(x)))
        return hidden


class OwnModel(nn.Module):
    """A model of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(4))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(x)
        return out


OWN_INPUT = (1, 24, 16)
OWN_SPLIT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def plan_of(name: str) -> PlanConfig:
    """The plan of a layout on 4 ranks."""
    more = EXPERTS if name in WITH_EXPERTS else {"kv_heads": 4} if name in OWN else {}
    layout = {**LAYOUTS, **WITH_EXPERTS, **OWN}[name]
    return parse_plan(plans.plan_text(model={"vocab": 64, **more}, **layout))


def counted(name: str) -> CollectiveCounter:
    """This real rank's third step: in its second one DDP agrees on its buckets."""
    plan = plan_of(name)
    assembled = assemble(plan, CPU, seed=0)
    optimizer = make_optimizer(assembled.model, RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    counter = CollectiveCounter(layout_axes(assembled.meshes, plan.layout))
    batches = micro_batches(sequences, plan, first=0, rank=dist.get_rank(), device=CPU)
    for _ in range(3):
        counter.forget()
        with counter:
            train_step(assembled, optimizer, batches, plan, clip_norm=RECIPE.clip_norm)
    return counter


def counted_own(name: str) -> CollectiveCounter:
    """The third step of the user's model on this real rank, in the loop of the documentation."""
    plan = plan_of(name)
    layout = plan.layout
    model, given = OwnModel(), torch.zeros(OWN_INPUT)
    counter = CollectiveCounter(layout_axes(build_meshes(layout, "cpu"), layout))
    called = parallelize(model, plan, tp_plan=OWN_SPLIT, example=(given,), numbers=False)
    model = called if layout.pp > 1 else model
    optimizer = make_optimizer(model, RECIPE)
    for _ in range(3):
        counter.forget()
        with counter:
            if layout.pp > 1:
                inputs = (given.repeat(layout.micro_batch * layout.num_microbatches, 1, 1),)
                forward_backward(called, plan, inputs, loss=lambda output, _: output.mean())
            for number in range(layout.num_microbatches if layout.pp == 1 else 0):
                is_last = number == layout.num_microbatches - 1
                with gradient_sync(called, layout, is_last=is_last):
                    called(given).mean().backward()
            clip_gradients(model, build_meshes(layout, "cpu"), RECIPE.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return counter


def as_lists(counter_calls: dict[Any, Any]) -> list[Any]:
    """Calls by group, as JSON has them; how many tokens go to an expert is the data's."""
    return sorted(
        [
            axis,
            list(ranks),
            [list(c._replace(bytes=0) if axis == "ep" else c) for c in calls],
        ]
        for (axis, ranks), calls in counter_calls.items()
    )


def count_all(out: Path) -> None:
    """Every layout; rank 3, which is in the last stage, writes what it called."""
    dist.init_process_group("gloo")
    found = {name: as_lists(counted(name).calls) for name in (*LAYOUTS, *WITH_EXPERTS)}
    found |= {name: as_lists(counted_own(name).calls) for name in OWN}
    jobs.leave_with(found, out, writer=3)
