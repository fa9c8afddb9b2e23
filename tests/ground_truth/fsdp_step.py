"""One optimizer step of the trainer as one rank of any world makes it: its own rehearsal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import named_stages, pipeline_ranks
from fsdpplan.cost.traffic.calls import Calls
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from fsdpplan.trainer.config import (
    LayoutConfig,
    ModelConfig,
    PlanConfig,
    TrainingConfig,
    parse_plan,
)
from fsdpplan.trainer.optimizer import Recipe
from fsdpplan.trainer.rehearse.counting import CollectiveRow, RowKey
from fsdpplan.trainer.rehearse.rank import RankRehearsal, on_cpu, rehearse_rank
from fsdpplan.trainer.text.data import open_sequences
from fsdpplan.trainer.torch_versions import RELEASE, lacking
from tests.cost.clusters import cluster

RECIPE = Recipe(steps=2, learning_rate=1e-3, warmup_steps=1, weight_decay=0.1, clip_norm=1.0)


def plan_config(model: Model, training: Training, layout: Layout) -> PlanConfig:
    """The plan as the trainer reads it, its stages named; the device is one of CUDA's, whatever its
    rates."""
    device = {
        "name": "any",
        "kind": "cuda",
        "peak_bf16_flops_per_second": 1e11,
        "peak_fp32_flops_per_second": 1e11,
    }
    document = {
        "schema_version": 1,
        "model": _known(ModelConfig, model),
        "cluster": {"device": device, "gpus": layout.world, "gpus_per_node": layout.world},
        "training": _known(TrainingConfig, training),
        "layout": _known(LayoutConfig, named_stages(model=model, layout=layout)),
    }
    return parse_plan(json.dumps(document))


def _known(config: Any, value: Any) -> dict[str, Any]:
    """The fields of `value` that the trainer reads; it has no model or layout for the others."""
    names = {field.name for field in fields(config)}
    return {name: part for name, part in asdict(value).items() if name in names}


def training_for(layout: Layout, *, seq_len: int, **settings: Any) -> Training:
    """A training whose global batch is what `layout` takes, under the torch that is here."""
    here = f"{RELEASE[0]}.{RELEASE[1]}"
    return Training(seq_len=seq_len, global_batch=layout.global_batch, torch=here, **settings)


def measured_step(
    model: Model, training: Training, layout: Layout, *, rank: int = 0
) -> RankRehearsal:
    """Run two steps of the trainer as `rank` of the layout's world, and measure the second."""
    plan = plan_config(model, training, layout)
    refused = "; ".join(lacking(on_cpu(plan)))
    if refused:
        pytest.skip(refused)
    sequences = open_sequences(plan, None, seed=0)
    return rehearse_rank(plan, rank, sequences=sequences, recipe=RECIPE, packs=training.packed)


def case_of(model: Model, training: Training, layout: Layout, *, profile: str = "dgx-h100") -> Case:
    """What is measured, as the cost model is asked about it; of the device it needs the kind."""
    here = cluster(profile, gpus=8)
    return Case(model=model, cluster=here, training=training, layout=layout)


def predicted_rows(model: Model, training: Training, layout: Layout) -> dict[RowKey, CollectiveRow]:
    """The cost model's calls of a step, summed like the measured ones."""
    (stage,) = pipeline_ranks(model=model, layout=layout)
    return summed(step_calls(case_of(model, training, layout), stage))


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
    (stage,) = pipeline_ranks(model=model, layout=layout)
    return stage_memory(
        case_of(model, training, replace(layout, compile=False)),
        stage,
        in_flight_blocks=model.layers,
    ).peak_allocated_bytes


def as_messages(rows: dict[RowKey, CollectiveRow]) -> dict[RowKey, CollectiveRow]:
    """A message is counted where it is sent."""
    return {
        ("send_recv" if collective == "send" else collective, *rest): row
        for (collective, *rest), row in rows.items()
        if collective != "recv"
    }
