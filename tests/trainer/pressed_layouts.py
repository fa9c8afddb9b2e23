"""Mixtures in pipelines that an auxiliary loss presses: gradients beside those of a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.model.balance import Balance, balance_experts
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.moe import mixtures
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.rehearse.counting import CollectiveCounter, layout_axes
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import jobs, losses, plans
from tests.trainer.pipeline_layouts import SCHEDULES, SPLIT, WHOLE, piped

STEPS = 2
"""Of other tokens, and with weights that stay: only biases move."""
RECIPE = replace(losses.RECIPE, learning_rate=0.0)
LEAST_SHARE = 1e-3
"""Of all gradients' norm: what is less is not divided by."""

EXPERTS = 6
MIXTURE = {"experts": EXPERTS, "active": 2, "hidden": 20}
MODELS: dict[str, dict[str, Any]] = {
    name: {"vocab": 64, "layers": layers, "experts": MIXTURE | experts}
    for name, layers, experts in (
        ("all", 4, {}),
        ("shared", 4, {"shared_hidden": 16, "shared_gate": True}),
        ("first dense", 4, {"dense_layers": 1}),
        ("last only", 4, {"dense_layers": 3}),
    )
}
FULL = {"activation_checkpointing": "full"}
ZERO_BUBBLE = "interleaved_zero_bubble"

LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        **{f"whole, {name}": ("all", piped(name, **WHOLE)) for name in SCHEDULES},
        **{f"sharded, {name}": ("first dense", piped(name)) for name in SCHEDULES},
        **{
            f"recomputed, {name}": ("shared", piped(name, **FULL))
            for name in ("1f1b", "looped_bfs", ZERO_BUBBLE, "zbv", "dualpipev")
        },
        "one micro-batch": ("all", piped("gpipe", num_microbatches=1)),
        "operations": ("all", piped("1f1b", activation_checkpointing="op", checkpoint_blocks=1)),
        "attention": ("all", piped("zbv", activation_checkpointing="attention")),
        "behind the first stage only": ("last only", piped("1f1b")),
        "before the last stage only": ("all", piped("zbv", stage_blocks=[2, 1, 1, 0])),
        "ends alone": ("all", piped("interleaved_1f1b", stage_blocks=[0, 2, 2, 0])),
        "head in pieces": ("all", piped("zbv", loss_chunks=3)),
        "parameters on the host": ("all", piped("1f1b", offload="cpu")),
    },
    3: {
        "three": ("first dense", piped("1f1b", pp=3)),
        "three with gaps": ("all", piped("zbv", pp=3, stage_blocks=[0, 2, 1, 0, 0, 1])),
    },
    4: {
        "four": ("all", piped("1f1b", pp=4)),
        "fsdp": ("all", piped("interleaved_1f1b", dp_shard=2)),
        "fsdp, zbv": ("shared", piped("zbv", dp_shard=2, **FULL)),
        "hsdp": ("all", piped("zbv", dp_replicate=2)),
        "ddp": ("all", piped(ZERO_BUBBLE, dp_replicate=2, **WHOLE)),
        "ep": ("shared", piped("1f1b", dp_shard=2, ep=2)),
        "ep, zero bubble": ("all", piped(ZERO_BUBBLE, dp_shard=2, ep=2)),
        "tp": ("all", piped("1f1b", **SPLIT)),
        "tp, zbv": ("shared", piped("zbv", **SPLIT, **FULL)),
        "tp, logits gathered": ("all", piped("1f1b", **{**SPLIT, "loss_parallel": False})),
        "tp, ddp": ("all", piped("dualpipev", **SPLIT, **WHOLE)),
        "cp": ("all", piped(ZERO_BUBBLE, cp=2)),
        "cp, ep": ("first dense", piped("interleaved_1f1b", cp=2, ep=2)),
    },
}
"""World -> layouts (model, layout) in which gradients must be those of one process."""

ONCE = {"num_microbatches": 1}
BF16: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16 fsdp": ("all", piped("gpipe", dp_shard=2, **ONCE)),
    "bf16 ddp": ("all", piped("gpipe", dp_replicate=2, **ONCE, **WHOLE)),
}
"""Of 4 ranks, which exchange activations in bf16."""

Gradients = dict[str, Tensor]


@cache
def plain_loop(model: str, micro_batches: int) -> list[tuple[float, Gradients]]:
    """(auxiliary loss, gradients) of each step, in one process, by autograd."""
    plan = parse_plan(plans.plan_text(model=MODELS[model]))
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    sequences = open_sequences(plan, None, seed=0)
    pressing = losses.Pressing(decoder, {"num_microbatches": micro_batches})
    found = []
    for step in range(STEPS):
        first = step * plans.GLOBAL_BATCH
        rows = torch.stack([sequences(first + row) for row in range(plans.GLOBAL_BATCH)])
        pressing.begin()
        decoder.zero_grad()
        for part in rows.chunk(micro_batches):
            with pressing.seen() as seen:
                mean = next_token_loss(decoder(part[:, :-1]), part[:, 1:]) / micro_batches
            (mean + pressing.loss(seen, tokens=rows[:, 1:].numel())).backward()
        found.append((pressing.end(), gradients_of(decoder)))
        balance_experts(decoder, None, plan.model, Balance(bias_rate=losses.BALANCE.bias_rate))
    return found


def gradients_of(model: torch.nn.Module) -> Gradients:
    """Whole ones, of this rank's parameters; all ranks call this."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = gradient.clone()
    return found


def largest_error(found: Gradients, expected: Gradients) -> float:
    """Of a gradient, over its norm."""
    whole = torch.stack([each.norm() for each in expected.values()]).norm()
    errors = [
        (gradient - expected[name]).norm()
        / torch.maximum(expected[name].norm(), LEAST_SHARE * whole)
        for name, gradient in found.items()
    ]
    return float(torch.stack(errors).max())


@jobs.refusable
def measure(text: str, model: str) -> dict[str, Any]:
    """Errors of gradients and auxiliary losses in each step; and what is sent in one with an
    auxiliary loss, and in one without."""
    plan = parse_plan(text)
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, RECIPE)
    kept: Gradients = {}
    optimizer.register_step_pre_hook(lambda *_: kept.update(gradients_of(assembled.model)))
    counter = CollectiveCounter(layout_axes(assembled.meshes, plan.layout))
    errors, off = [], []
    for step, (auxiliary, expected) in enumerate(plain_loop(model, plan.layout.num_microbatches)):
        counter.forget()
        with counter:
            output = train_step(
                assembled,
                optimizer,
                batches_of(plan, step),
                plan,
                clip_norm=math.inf,
                balance=losses.BALANCE,
            )
        errors.append(largest_error(kept, expected))
        assert output.balanced is not None
        assert output.balanced.auxiliary_loss is not None
        off.append(abs(output.balanced.auxiliary_loss.item() - auxiliary))
    pressed_by = [each.pressure.tolist() for each in mixtures(assembled.model)]
    with_loss = messages(counter)
    for _ in range(2):  # the first of a schedule asks more
        counter.forget()
        with counter:
            train_step(assembled, optimizer, batches_of(plan, 0), plan, clip_norm=math.inf)
    return {
        "ranks": everyones(
            {
                "errors": errors,
                "auxiliary": off,
                "with": with_loss,
                "without": messages(counter),
                "pressed_by": pressed_by,
            }
        )
    }


def batches_of(plan: PlanConfig, step: int) -> Any:
    """This rank's micro-batches of a step."""
    sequences = open_sequences(plan, None, seed=0)
    first = step * plan.training.global_batch
    return micro_batches(sequences, plan, first=first, rank=dist.get_rank(), device=losses.CPU)


def messages(counter: CollectiveCounter) -> dict[str, list[int]]:
    """(count, bytes) of what this rank sends between stages, by dtype."""
    return {
        dtype: [row.count, row.bytes]
        for (collective, _, _, dtype), row in counter.rows.items()
        if collective == "send"
    }


def everyones(value: Any) -> list[Any]:
    """`value` of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure_all(out: Path) -> None:
    """Every layout of this world; rank 0 writes."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, (model, layout) in jobs.asked_of(LAYOUTS[dist.get_world_size()]).items():
        results[name] = measure(plans.plan_text(model=MODELS[model], **layout), model)
    if dist.get_world_size() == 4:
        for name, (model, layout) in jobs.asked_of(BF16).items():
            text = plans.plan_text(model=MODELS[model], training={"precision": "bf16"}, **layout)
            results[name] = measure(text, model)
    jobs.leave_with(results, out)
