"""Layouts of mixtures of experts, for ranks that run them one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.trainer import jobs, losses, plans

MIXTRAL = {"experts": {"experts": 4, "active": 2, "hidden": 32}}
SHARED = {
    "experts": {
        "experts": 8,
        "active": 3,
        "hidden": 24,
        "shared_hidden": 32,
        "shared_gate": True,
        "dense_layers": 1,
    }
}
BIASED = {
    "mlp": "gelu",
    "experts": {"experts": 4, "active": 2, "hidden": 20, "router_bias": True, "bias": True},
}
FEW = {"experts": {"experts": 3, "active": 2, "hidden": 20}}
MODELS: dict[str, dict[str, Any]] = {
    name: {"layers": 2, "vocab": 64, "kv_heads": 4, **model}
    for name, model in {"mixtral": MIXTRAL, "shared": SHARED, "biased": BIASED, "few": FEW}.items()
}

BF16 = {"precision": "bf16"}
TP2: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
NEVER = {"reshard_after_forward": "never"}
TWICE = {"num_microbatches": 2}
LAST = TWICE | {"gradient_sync": "last"}
FULL = {"activation_checkpointing": "full"}
OP = {"activation_checkpointing": "op"}
ATTENTION = {"activation_checkpointing": "attention"}
EP2 = {"ep": 2}
EP4 = {"ep": 4}
SHARD2 = {"dp_shard": 2}
SHARD4 = {"dp_shard": 4}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
DDP = {"dp_replicate": 4, "sharding": "ddp"}
PP2 = LAST | NEVER | {"pp": 2, "schedule": "1f1b"}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("mixtral", DDP),
    "fsdp": ("mixtral", SHARD4),
    "fsdp, experts split by rows": ("few", SHARD4),
    "ep4": ("mixtral", SHARD4 | EP4),
    "ep4, biased": ("biased", SHARD4 | EP4),
    "ep2 of 4": ("mixtral", SHARD4 | EP2),
    "ep2 of 4, shared, twice": ("shared", SHARD4 | EP2 | TWICE),
    "ep2 of 4, shared, last": ("shared", SHARD4 | EP2 | LAST),
    "ep2 of 4, wrapped, never": ("shared", SHARD4 | EP2 | NEVER | {"wrap_blocks": 2}),
    "ep2 of 4, full": ("shared", SHARD4 | EP2 | FULL),
    "ep2 of 4, op": ("shared", SHARD4 | EP2 | OP),
    "ep2 of 4, attention": ("shared", SHARD4 | EP2 | ATTENTION),
    "ep2 hsdp": ("shared", HSDP | EP2),
    "ep2 tp2": ("shared", SHARD2 | EP2 | TP2),
    "ep2 of 2, tp2, op": ("shared", SHARD2 | EP2 | TP2 | OP),
    "ep2 tp2, biased": ("biased", SHARD2 | EP2 | TP2),
    "tp2 fsdp": ("shared", SHARD2 | TP2),
    "tp2 fsdp, biased": ("biased", SHARD2 | TP2),
    "ep2 over cp2": ("shared", {"cp": 2, "dp_shard": 2} | EP2),
    "ep4 over cp2": ("shared", {"cp": 2, "dp_shard": 2} | EP4),
    "ep2 pp2": ("shared", SHARD2 | EP2 | PP2),
    "bf16 ddp": ("shared", DDP),
    "bf16 ep2 of 4": ("shared", SHARD4 | EP2),
    "bf16 ep2 tp2": ("biased", SHARD2 | EP2 | TP2),
}
"""(model, layout) of 4 ranks."""


def plan_arguments(name: str) -> dict[str, Any]:
    """What `plans.plan_document` takes."""
    model, layout = LAYOUTS[name]
    training = BF16 if name.startswith("bf16") else {}
    return {"model": MODELS[model], "training": training, **layout}


def measure_all(out: Path) -> None:
    """Every layout, and the references; rank 0 writes the results."""
    dist.init_process_group("gloo")
    results = {
        name: losses.measure(plans.plan_text(**plan_arguments(name)))
        for name in filter(jobs.is_asked, LAYOUTS)
    }
    if dist.get_rank() == 0:
        results |= losses.references(MODELS, jobs.asked_of(LAYOUTS).values())
    jobs.leave_with(results, out)
