"""Gradients of many micro-batches of a model with bf16 parameters, on gloo ranks: how far they are
from the sums of the same gradients in fp64, as a share of their norm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.parallel.local_parameters import hand_over_gradients
from fsdpplan.trainer.step import forward_backward
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import jobs, plans
from tests.trainer.matrix_layouts import SPLIT

CPU = torch.device("cpu")
PASSES = 128
SMALL: dict[str, Any] = {"layers": 1, "ffn_hidden": 48}
KEPT: dict[str, Any] = {"precision": "bf16", "param_dtype": "bf16"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"dp_shard": 2},
    "sharded, by pairs": {"dp_replicate": 2, "dp_shard": 1},
    "sharded, reduced in the end": {"dp_shard": 2, "gradient_sync": "last"},
    "sharded, added over replicas in the end": {
        "dp_replicate": 2,
        "gradient_sync": "reduce_scatter_only",
    },
    "offloaded": {"dp_shard": 2, "offload": "cpu"},
    "copied": {"dp_replicate": 2, "sharding": "ddp", "gradient_sync": "last"},
    "copied, reduced each time": {"dp_replicate": 2, "sharding": "ddp"},
    "split alone": SPLIT | {"sharding": "ddp"},
}


def whole_gradients(model: nn.Module) -> torch.Tensor:
    """All gradients of a model, whole, one after the other."""
    found = []
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        found.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
    return torch.cat([each.detach().double().flatten() for each in found])


def error_of(text: str) -> float:
    """Of a step's gradients, beside the mean of its micro-batches' own in fp64."""
    plan = parse_plan(text)
    assembled = assemble(plan, CPU, seed=0)
    sequences = open_sequences(plan, None, seed=0)
    batches = micro_batches(sequences, plan, first=0, rank=dist.get_rank(), device=CPU)
    one = replace(plan, layout=replace(plan.layout, num_microbatches=1))
    exact = torch.zeros(())
    for batch in batches:
        forward_backward(assembled, [batch], one)
        hand_over_gradients(assembled.parts)
        exact = exact + whole_gradients(assembled.model) / PASSES
        for parameter in assembled.model.parameters():
            parameter.grad = None
    forward_backward(assembled, batches, plan)
    hand_over_gradients(assembled.parts)
    found = whole_gradients(assembled.model)
    return float((found - exact).norm() / exact.norm())


def measure_all(out: Path) -> None:
    """Every layout's error."""
    dist.init_process_group("gloo")
    found = {
        name: error_of(
            plans.plan_text(
                model=SMALL, training=KEPT, micro_batch=1, num_microbatches=PASSES, **layout
            )
        )
        for name, layout in jobs.asked_of(LAYOUTS).items()
    }
    jobs.leave_with(found, out)
