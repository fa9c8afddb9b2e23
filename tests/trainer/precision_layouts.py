"""What each rank of the tests of number formats and optimizers runs: all in one process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.balance import Balance
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.parallel.assemble import Assembled, assemble
from fsdpplan.trainer.parallel.shards import local
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import jobs, losses, plans

RECIPE = replace(losses.RECIPE, steps=3)
MUON = replace(RECIPE, optimizer="muon")
TWO_STAGES = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 2,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
TENSOR = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
DENSE = {"vocab": 64}
MIXTURE = {**DENSE, "experts": {"experts": 4, "active": 2, "hidden": 32}}

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "ddp": {"dp_replicate": 4, "sharding": "ddp"},
    "fsdp_tp": {"dp_shard": 2, **TENSOR},
    "fsdp_pp": {"dp_shard": 2, **TWO_STAGES},
}
"""Of four ranks."""

HALF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"half_{name}_{reduced}": (
        layout,
        {"precision": "bf16", "param_dtype": "bf16", "reduce_dtype": reduced},
    )
    for name, layout in LAYOUTS.items()
    for reduced in ("fp32", "bf16")
}
"""The same with parameters in bf16, reduced in both dtypes."""

UNEVEN = {"dp_shard": 4, "wrap_blocks": 2}

EXPERTS: dict[str, dict[str, Any]] = {
    "experts_fsdp": {"dp_shard": 4},
    "experts_ep": {"dp_shard": 4, "ep": 2},
}


Spoil = Callable[[Assembled], None]
SPOILED_STEP = 1


def train(text: str, recipe: Recipe, *, spoil: Spoil | None = None) -> dict[str, Any]:
    """Some steps of the plan in `text`: losses, norms, loss scales, and the sum of all weights."""
    plan = parse_plan(text)
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, recipe)
    sequences = open_sequences(plan, None, seed=0)
    results: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "weights": []}
    for step in range(recipe.steps):
        first = step * plan.training.global_batch
        batches = micro_batches(
            sequences, plan, first=first, rank=dist.get_rank(), device=losses.CPU
        )
        if spoil is not None and step == SPOILED_STEP:
            spoil(assembled)
        balance = Balance() if plan.model.experts is None else losses.BALANCE
        output = train_step(
            assembled, optimizer, batches, plan, clip_norm=recipe.clip_norm, balance=balance
        )
        loss = output.loss.clone()
        dist.all_reduce(loss)
        results["losses"].append(loss.item() * plan.layout.pp / dist.get_world_size())
        results["norms"].append(output.grad_norm.item())
        results["weights"].append(weight_sum(assembled))
        if assembled.scaler is not None:
            results["scales"].append(assembled.scaler.scale.item())
    results["dtypes"] = sorted(kept_dtypes(assembled, optimizer))
    return results


def kept_dtypes(assembled: Assembled, optimizer: torch.optim.Optimizer) -> set[str]:
    """Of parameters and their moments."""
    kept = [local(parameter) for parameter in assembled.model.parameters()]
    for state in optimizer.state.values():
        kept += [local(each) for name, each in state.items() if name != "step"]
    return {str(tensor.dtype) for tensor in kept}


def make_overflow(assembled: Assembled) -> None:
    """A scale at which every gradient overflows in fp16."""
    assert assembled.scaler is not None
    assembled.scaler.scale.fill_(2.0**60)


def spoil_one_gradient(assembled: Assembled) -> None:
    """One element of one gradient of the last rank becomes infinite, once."""
    scaler = assembled.scaler
    assert scaler is not None
    unscale = scaler.unscale

    def unscale_and_spoil(model: nn.Module) -> None:
        unscale(model)
        scaler.unscale = unscale  # type: ignore[method-assign]
        if dist.get_rank() == dist.get_world_size() - 1:
            gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
            next(each for each in gradients if each.numel()).view(-1)[0] = float("inf")

    scaler.unscale = unscale_and_spoil  # type: ignore[method-assign]


SPOILS: dict[str, Spoil] = {
    "hsdp": make_overflow,
    "ddp": make_overflow,
    "fsdp_tp": spoil_one_gradient,
    "fsdp_pp": spoil_one_gradient,
}


def weight_sum(assembled: Assembled) -> float:
    """Of this rank's part, in absolute values: what an update changes."""
    parts = [local(parameter) for parameter in assembled.model.parameters()]
    return float(torch.stack([part.detach().abs().sum() for part in parts]).sum())


def everyones(value: Any) -> list[Any]:
    """`value` of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure_scaling(out: Path) -> None:
    """Losses in fp16, and steps that overflow."""
    dist.init_process_group("gloo")
    fp16 = {"precision": "fp16"}
    results: dict[str, Any] = {}
    for name, layout in jobs.asked_of(LAYOUTS).items():
        text = plans.plan_text(model=DENSE, training=fp16, **layout)
        results[name] = train(text, RECIPE)
        spoil = SPOILS.get(name)
        if spoil is not None:
            results[f"{name}_spoiled"] = {"ranks": everyones(train(text, RECIPE, spoil=spoil))}
    for name, (layout, training) in jobs.asked_of(HALF).items():
        text = plans.plan_text(model=DENSE, training=training, **layout)
        results[name] = {"ranks": everyones(train(text, RECIPE))}
    if dist.get_rank() == 0:
        results["fp32"] = losses.reference(DENSE, RECIPE)
        results["bf16"] = losses.reference(DENSE, RECIPE, dtype=torch.bfloat16)
    jobs.leave_with(results, out)


def measure_optimizers(out: Path) -> None:
    """Losses with every optimizer."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, layout in jobs.asked_of(LAYOUTS).items():
        results[f"muon_{name}"] = train(plans.plan_text(model=DENSE, **layout), MUON)
    for name, layout in jobs.asked_of(EXPERTS).items():
        results[f"muon_{name}"] = train(plans.plan_text(model=MIXTURE, **layout), MUON)
    for kind in ("fused", "foreach", "loop"):
        recipe = replace(RECIPE, adamw=kind)
        results[f"adamw_{kind}"] = train(plans.plan_text(model=DENSE, **UNEVEN), recipe)
    if dist.get_rank() == 0:
        results["adamw"] = losses.reference(DENSE, RECIPE)
        results["muon"] = losses.reference(DENSE, MUON)
        results["muon_experts"] = losses.reference(MIXTURE, MUON)
    jobs.leave_with(results, out)
