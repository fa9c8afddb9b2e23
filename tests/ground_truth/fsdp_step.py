"""One optimizer step of the trainer, as one rank of any world makes it, under fake tensors.

The code measured is the trainer's own: its decoder, `parallelize`, optimizer and `train_step`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdpplan.cost.memory import stage_memory
from fsdpplan.cost.shards import whole_model
from fsdpplan.cost.traffic import Calls, step_calls
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.trainer import materialise, parallelize
from fsdpplan.trainer.config import (
    LayoutConfig,
    ModelConfig,
    PlanConfig,
    TrainingConfig,
    parse_plan,
)
from fsdpplan.trainer.model import Decoder
from fsdpplan.trainer.step import Recipe, make_optimizer, train_step
from tests.cost.clusters import cluster
from tests.ground_truth.fake_cluster import (
    CollectiveCounter,
    CollectiveRow,
    LiveBytes,
    RowKey,
    cuda_like_norms,
    fake_tensors,
    fake_world,
)

RECIPE = Recipe(steps=2, learning_rate=1e-3, warmup_steps=1, weight_decay=0.1, clip_norm=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What one rank did in its second step, when all optimizer state exists."""

    rows: dict[RowKey, CollectiveRow]
    peak_bytes: int
    peak_in_phase: dict[str, int]
    """Highest level in `step` (forward, backward and clipping) and in `optimizer`."""
    state_bytes: int
    """Parameters, optimizer state and input tokens: the level between steps."""


def plan_config(model: Model, training: Training, layout: Layout) -> PlanConfig:
    """The plan as the trainer reads it, for CPU devices."""
    device = {
        "name": "cpu",
        "kind": "cpu",
        "peak_bf16_flops_per_second": 1e11,
        "peak_fp32_flops_per_second": 1e11,
    }
    document = {
        "schema_version": 1,
        "model": _known(ModelConfig, model),
        "cluster": {"device": device, "gpus": layout.world, "gpus_per_node": layout.world},
        "training": _known(TrainingConfig, training),
        "layout": _known(LayoutConfig, layout),
    }
    return parse_plan(json.dumps(document))


def _known(config: Any, value: Any) -> dict[str, Any]:
    """The fields of `value` that the trainer reads; it has no model or layout for the others."""
    names = {field.name for field in fields(config)}
    return {name: part for name, part in asdict(value).items() if name in names}


def training_for(layout: Layout, *, seq_len: int, **settings: Any) -> Training:
    """A training whose global batch is what `layout` takes."""
    return Training(seq_len=seq_len, global_batch=layout.global_batch, **settings)


def measured_step(
    model: Model, training: Training, layout: Layout, *, rank: int = 0
) -> MeasuredStep:
    """Run two steps of the trainer as `rank` of the layout's world, and measure the second."""
    plan = plan_config(model, training, layout)
    with fake_world(layout.world, rank=rank), cuda_like_norms():
        with torch.device("meta"):
            decoder: nn.Module = Decoder(plan.model)
        decoder = parallelize(decoder, plan)
        mesh = _mesh(decoder)
        with fake_tensors():
            materialise(decoder, torch.device("cpu"))
            return _measure(decoder, plan, CollectiveCounter(mesh))


def _mesh(model: nn.Module) -> DeviceMesh:
    parameter = next(model.parameters())
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh


def _measure(model: nn.Module, plan: PlanConfig, collectives: CollectiveCounter) -> MeasuredStep:
    optimizer = make_optimizer(model, RECIPE, fused=True)
    batches = token_batches(plan)
    live = LiveBytes()
    live.add("parameters", *model.parameters())
    live.add("tokens", *(tensor for batch in batches for tensor in batch))
    optimizer.register_step_pre_hook(lambda *_: setattr(live, "tag", "optimizer"))
    with live, collectives:
        for _ in range(2):
            collectives.rows.clear()
            live.start_phase("step")
            train_step(model, optimizer, batches, plan.layout, clip_norm=RECIPE.clip_norm)
    return MeasuredStep(
        rows=dict(collectives.rows),
        peak_bytes=live.peak,
        peak_in_phase=dict(live.peak_in_tag),
        state_bytes=live.total,
    )


def token_batches(plan: PlanConfig) -> list[tuple[Tensor, Tensor]]:
    """(tokens, targets) of each micro-batch of one rank."""
    shape = (plan.layout.micro_batch, plan.training.seq_len)
    tokens = [
        torch.zeros(shape, dtype=torch.int64) for _ in range(2 * plan.layout.num_microbatches)
    ]
    return list(zip(tokens[::2], tokens[1::2], strict=True))


def predicted_rows(model: Model, training: Training, layout: Layout) -> dict[RowKey, CollectiveRow]:
    """The cost model's calls of a step, summed like the measured ones."""
    return summed(
        step_calls(model=model, training=training, layout=layout, stage=whole_model(model))
    )


def summed(calls: Iterable[Calls]) -> dict[RowKey, CollectiveRow]:
    """Calls by (collective, axis, ranks, dtype)."""
    rows: dict[RowKey, CollectiveRow] = {}
    for call in calls:
        key = (call.collective, call.group.axis, call.group.ranks, call.dtype)
        row = rows.setdefault(key, CollectiveRow())
        row.count += call.count
        row.bytes += call.count * call.call_bytes
    return rows


def predicted_peak_bytes(model: Model, training: Training, layout: Layout) -> int:
    """The cost model's peak of allocated bytes; on a CPU blocks are not compiled."""
    return stage_memory(
        model=model,
        cluster=cluster(gpus=8),
        training=training,
        layout=replace(layout, compile=False),
        stage=whole_model(model),
        in_flight_blocks=model.layers,
    ).peak_allocated_bytes
