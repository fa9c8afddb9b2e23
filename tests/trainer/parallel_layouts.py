"""Layouts with tensor and context parallelism, for ranks that run them one after the other."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpplan.cost.model.shards import whole_model
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import LatentAttention, Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.model.weights import VOCABULARIES, named_parameters
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.rehearse.counting import CollectiveCounter, layout_axes
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from fsdpplan.trainer.torch_versions import RELEASE
from tests.trainer import jobs, losses, plans

STEPS = 2

TP: dict[str, Any] = {"sequence_parallel": True, "loss_parallel": True}
TP2 = TP | {"tp": 2}
TP4 = TP | {"tp": 4}
CP2 = {"cp": 2}
CP4 = {"cp": 4}
SHARD2 = {"dp_shard": 2}
HSDP = {"dp_replicate": 2}
DDP2 = {"dp_replicate": 2, "sharding": "ddp"}
NEVER = {"reshard_after_forward": "never"}
TWICE = {"num_microbatches": 2}
LAST = TWICE | {"gradient_sync": "last"}
FULL = {"activation_checkpointing": "full"}
OP = {"activation_checkpointing": "op"}
ATTENTION = {"activation_checkpointing": "attention"}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"layers": 2, "vocab": 64},
    "wide": {"layers": 2, "vocab": 64, "kv_heads": 4},
    "gpt2": {**plans.GPT2_STYLE, "layers": 2, "vocab": 64},
    "latent": {
        "layers": 2,
        "vocab": 64,
        "kv_heads": 4,
        "qk_norm": False,
        "latent": {"kv_rank": 16, "query_rank": 20, "rope_head_dim": 4, "value_head_dim": 8},
    },
    # Of its own width: up to torch 2.10 DTensor takes a token table's gradient for one of another
    # length that it met before, where all else is of one shape.
    "uneven": {"layers": 2, "hidden": 56, "vocab": 66, "ffn_hidden": 98},
    "olmo2": {"layers": 2, "vocab": 64, "kv_heads": 4, "qk_norm_width": "all_heads"},
    "odd": {
        "layers": 2,
        "vocab": 64,
        "kv_heads": 4,
        "mlp": "geglu",
        "positions": "alibi",
        "attention_sinks": True,
        "post_norms": True,
        "embedding_norm": True,
        "sliding_window": 5,
        "full_attention_every": 2,
    },
    "six": {"layers": 2, "vocab": 64, "heads": 6, "kv_heads": 2, "head_dim": 8},
    "threes": {"layers": 2, "vocab": 63, "heads": 6, "kv_heads": 3, "head_dim": 8},
    # no tp divides their vocabularies: two or four ranks pad 61 to 64; of 17 rows on 4 ranks, which
    # pad to 64 as well, two ranks have none
    "padded": {"layers": 2, "hidden": 48, "vocab": 61, "kv_heads": 4},
    "padded gpt2": {**plans.GPT2_STYLE, "layers": 2, "hidden": 72, "vocab": 61},
    "lonely": {"layers": 2, "hidden": 40, "vocab": 17, "kv_heads": 4},
}

MODELS["six odd"] = MODELS["odd"] | {"heads": 6, "kv_heads": 6}

SETS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "tensor_4": {
        "tp4": ("wide", TP4),
        "tp2 fsdp": ("llama", TP2 | SHARD2),
        "tp2 fsdp, logits gathered": ("llama", TP2 | SHARD2 | {"loss_parallel": False}),
        "tp2 fsdp, never": ("llama", TP2 | SHARD2 | NEVER),
        "tp2 fsdp, wrapped": ("llama", TP2 | SHARD2 | {"wrap_blocks": 2}),
        "tp2 hsdp": ("llama", TP2 | HSDP),
        "tp2 ddp": ("llama", TP2 | DDP2),
        "tp4, one replica": ("wide", TP4 | {"sharding": "ddp"}),
        "tp2 fsdp, full": ("llama", TP2 | SHARD2 | FULL),
        "tp2 fsdp, op": ("llama", TP2 | SHARD2 | OP),
        "tp2 fsdp, attention": ("llama", TP2 | SHARD2 | ATTENTION),
        "tp2 ddp, full": ("llama", TP2 | DDP2 | FULL),
        "tp2 ddp, op": ("llama", TP2 | DDP2 | OP),
        "tp2 fsdp, twice": ("llama", TP2 | SHARD2 | TWICE),
        "tp2 fsdp, last": ("llama", TP2 | SHARD2 | LAST),
        "tp2 ddp, last": ("llama", TP2 | DDP2 | LAST),
        "tp2 ddp, chunks": ("llama", TP2 | DDP2 | {"loss_chunks": 3}),
        "gpt-2 tp2 ddp, chunks": ("gpt2", TP2 | DDP2 | LAST | {"loss_chunks": 2}),
        "tp2 fsdp, uneven shards": ("uneven", TP2 | SHARD2),
        "gpt-2 tp4": ("gpt2", TP4),
        "gpt-2 tp2 fsdp": ("gpt2", TP2 | SHARD2),
        "gpt-2 tp2 ddp": ("gpt2", TP2 | DDP2),
        "latent tp4": ("latent", TP4),
        "latent tp2 fsdp": ("latent", TP2 | SHARD2),
        "olmo 2 tp2 fsdp": ("olmo2", TP2 | SHARD2),
        "odd tp2 fsdp": ("odd", TP2 | SHARD2),
        "padded tp4": ("padded", TP4),
        "padded tp4, lonely": ("lonely", TP4),
        "padded tp4, lonely, chunks": ("lonely", TP4 | {"loss_chunks": 3}),
        "padded tp2 fsdp": ("padded", TP2 | SHARD2),
        "padded tp2 fsdp, logits gathered": ("padded", TP2 | SHARD2 | {"loss_parallel": False}),
        "padded tp2 fsdp, chunks": ("padded", TP2 | SHARD2 | {"loss_chunks": 3}),
        "padded tp2 ddp, last": ("padded", TP2 | DDP2 | LAST),
        "padded tp2 ddp, chunks": ("padded", TP2 | DDP2 | {"loss_chunks": 3}),
        "padded gpt-2 tp4": ("padded gpt2", TP4),
        "padded gpt-2 tp2 fsdp": ("padded gpt2", TP2 | SHARD2),
        "padded gpt-2 tp2 ddp, chunks": ("padded gpt2", TP2 | DDP2 | LAST | {"loss_chunks": 2}),
        "bf16 padded tp2 fsdp": ("padded", TP2 | SHARD2),
        "bf16 tp2 fsdp": ("llama", TP2 | SHARD2),
        "bf16 tp2 ddp": ("llama", TP2 | DDP2),
    },
    "context_4": {
        "cp4, keys repeated": ("llama", CP4),
        "cp2 fsdp": ("llama", CP2 | SHARD2),
        "cp2 fsdp, never": ("llama", CP2 | SHARD2 | NEVER),
        "cp2 fsdp, to two": ("llama", CP2 | SHARD2 | {"reshard_after_forward": 2}),
        "cp2 hsdp": ("llama", CP2 | HSDP),
        "cp2 tp2": ("llama", CP2 | TP2),
        "cp2 fsdp, full": ("llama", CP2 | SHARD2 | FULL),
        "cp2 fsdp, op": ("llama", CP2 | SHARD2 | OP),
        "cp2 fsdp, attention": ("llama", CP2 | SHARD2 | ATTENTION),
        "cp2 fsdp, last": ("llama", CP2 | SHARD2 | LAST),
        "gpt-2 cp2 tp2": ("gpt2", CP2 | TP2),
        "gpt-2 cp4": ("gpt2", CP4),
        "latent cp2 tp2": ("latent", CP2 | TP2),
        "odd cp2 tp2": ("odd", CP2 | TP2),
        "six cp4": ("six", CP4),
        "six cp2 tp2": ("six", CP2 | TP2),
        "six odd cp4": ("six odd", CP4),
        "bf16 cp2 fsdp": ("llama", CP2 | SHARD2),
    },
    "threes_3": {
        "tp3": ("threes", TP | {"tp": 3}),
        "cp3": ("threes", {"cp": 3}),
    },
}
"""Layouts (model, layout) that one set of processes runs, whose number ends the set's name."""


def cases(*sets: str, precision: str = "fp32") -> list[tuple[str, str]]:
    """(set, name) of the layouts in a precision."""
    return [
        (which, name)
        for which in sets
        for name in SETS[which]
        if name.startswith("bf16") == (precision == "bf16")
    ]


def document(which: str, name: str) -> dict[str, Any]:
    """The plan of a layout."""
    model, layout = SETS[which][name]
    training = {"precision": "bf16"} if name.startswith("bf16") else {}
    return plans.plan_document(model=MODELS[model], training=training, **layout)


def predicted_rows(which: str, name: str) -> list[list[Any]]:
    """The cost model's collectives of a step, as `measure` counts them."""
    planned = document(which, name)
    layout = Layout(**{**planned["layout"], "stage_blocks": ()})
    model = dict(planned["model"])
    if "latent" in model:
        model["latent"] = LatentAttention(**model["latent"])
    known = {each.name for each in fields(Training)}
    training = {key: value for key, value in planned["training"].items() if key in known}
    case = Case(
        model=Model(**model),
        cluster=load_cluster("cpu", gpus=layout.world).cluster,
        training=Training(**training | {"torch": f"{RELEASE[0]}.{RELEASE[1]}"}),
        layout=layout,
    )
    calls = step_calls(case, whole_model(case.model))
    rows: dict[tuple[Any, ...], list[int]] = {}
    for call in calls:
        row = rows.setdefault(
            (call.collective, call.group.axis, call.group.ranks, call.dtype), [0, 0]
        )
        row[0] += call.count
        row[1] += call.count * call.call_bytes
    return sorted([*key, *row] for key, row in rows.items())


@cache
def measured(which: str, names: frozenset[str]) -> dict[str, Any]:
    """What the ranks of a set measure, each layout in turn; once a test process."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / f"{which}.json"
        world = int(which.rpartition("_")[2])
        return jobs.measured(world, "tests.trainer.parallel_layouts:measure_all", out, asked=names)


@jobs.refusable
def measure(text: str) -> dict[str, Any]:
    """Losses and gradient norms of two steps, and the collectives of the second."""
    plan = parse_plan(text)
    assembled = assemble(plan, losses.CPU, seed=0)
    optimizer = make_optimizer(assembled.model, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    counter = CollectiveCounter(layout_axes(assembled.meshes, plan.layout))
    for step in range(STEPS):
        counter.forget()
        batches = micro_batches(
            sequences,
            plan,
            first=step * plan.training.global_batch,
            rank=dist.get_rank(),
            device=losses.CPU,
        )
        with counter:
            output = train_step(
                assembled, optimizer, batches, plan, clip_norm=losses.RECIPE.clip_norm
            )
        loss = output.loss.clone()
        dist.all_reduce(loss)
        found["losses"].append(loss.item() / dist.get_world_size())
        found["norms"].append(output.grad_norm.item())
    # DDP tells its buckets once, in the second step
    rows = [
        [*key, row.count, row.bytes]
        for key, row in counter.rows.items()
        if key[2] > 1 and key[0] != "broadcast"
    ]
    return {**found, "rows": sorted(rows), "padding": padding(assembled.model, plan)}


def padding(model: nn.Module, plan: PlanConfig) -> dict[str, float]:
    """Largest number in the padded rows of each table, where it has any."""
    found = {}
    for name, parameter in named_parameters(model):
        rows = whole(parameter.detach())[plan.model.vocab :] if name in VOCABULARIES else []
        if len(rows):
            found[name] = rows.abs().max().item()
    return found


def whole(values: Tensor) -> Tensor:
    """A parameter over all ranks."""
    return values.full_tensor() if isinstance(values, DTensor) else values


def measure_all(out: Path) -> None:
    """The layouts of the set that `out` is named after, and their references; rank 0 writes."""
    dist.init_process_group("gloo")
    layouts = jobs.asked_of(SETS[out.stem])
    results = {name: measure(json.dumps(document(out.stem, name))) for name in layouts}
    if dist.get_rank() == 0:
        models = {model for model, _ in layouts.values()}
        results |= {model: losses.reference(MODELS[model]) for model in models}
    jobs.leave_with(results, out)
