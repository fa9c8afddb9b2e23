"""Gradients of many micro-batches of a model with bf16 parameters, on gloo ranks: how far they are
from the sums of the same gradients in fp64, as a share of their norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.parallel.assemble import Assembled, assemble
from fsdpplan.trainer.parallel.local_parameters import hand_over_gradients
from fsdpplan.trainer.precision import keep_parameters
from fsdpplan.trainer.step import forward_backward
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from fsdpplan.trainer.text.packing import MicroBatch
from tests.trainer import jobs, plans
from tests.trainer.matrix_layouts import SPLIT

CPU = torch.device("cpu")
PASSES = 128
SMALL: dict[str, Any] = {"layers": 1, "ffn_hidden": 48}
KEPT: dict[str, Any] = {"precision": "bf16", "param_dtype": "bf16"}

PIPED: dict[str, Any] = {"pp": 2, "sharding": "ddp", "gradient_sync": "last"}
SCHEDULES = {
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
}

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
    **{
        f"a pipeline of copies, {schedule}": PIPED
        | {"schedule": schedule, "virtual_stages": stages}
        for schedule, stages in SCHEDULES.items()
    },
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
    if plan.layout.pp > 1:
        return error_of_stages(assembled, batches, plan)
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


def error_of_stages(assembled: Assembled, batches: Sequence[MicroBatch], plan: PlanConfig) -> float:
    """The same of a pipeline, beside the whole model on each rank; the second of two steps."""
    of_whole = exact_of(plan, batches)
    exact = torch.cat([of_whole[name] for name, _ in assembled.model.named_parameters()])
    for _ in range(2):
        assembled.model.zero_grad()
        forward_backward(assembled, batches, plan)
        hand_over_gradients(assembled.parts)
    found = whole_gradients(assembled.model)
    squares = torch.stack([(found - exact).square().sum(), exact.square().sum()])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())


EXACT: dict[str, torch.Tensor] = {}
"""By parameter: the mean gradient of a whole model's micro-batches, which all pipelines have."""


def exact_of(plan: PlanConfig, batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Of the whole model, in this process alone."""
    if EXACT:
        return EXACT
    whole = Decoder(plan.model)
    keep_parameters(whole, plan.training)
    initialise(whole, seed=0, layers=plan.model.layers)
    for batch in batches:
        whole.zero_grad()
        next_token_loss(whole(batch.tokens), batch.targets).backward()
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            more = parameter.grad.double().flatten() / PASSES
            EXACT[name] = EXACT[name] + more if name in EXACT else more
    return EXACT


def measure_all(out: Path) -> None:
    """Every layout's error."""
    dist.init_process_group("gloo")
    found = {
        name: error_of(
            plans.plan_text(
                model=SMALL | ({"layers": 4} if "pp" in layout else {}),
                training=KEPT,
                micro_batch=1,
                num_microbatches=PASSES,
                **layout,
            )
        )
        for name, layout in jobs.asked_of(LAYOUTS).items()
    }
    jobs.leave_with(found, out)
