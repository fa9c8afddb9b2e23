"""Layouts in which axes meet: pairs on 4 processes, triples on 8, other numbers on 6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.trainer import jobs, losses, plans

STEPS = 2
"""One update between them."""

SPLIT = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
PIPED = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 2,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
WHOLE = {"sharding": "ddp", "reshard_after_forward": "always"}
SHARDED = {"dp_shard": 2}
COPIED = {"dp_replicate": 2}
RING = {"cp": 2}
EXPERT = {"ep": 2}

EXPERTS: dict[str, Any] = {
    "experts": {"experts": 4, "active": 2, "hidden": 32, "shared_hidden": 24, "dense_layers": 1}
}
"""A mixture with a shared expert behind one dense block."""

SIX_HEADS = {"hidden": 72, "heads": 6, "kv_heads": 3, "vocab": 60, "layers": 6}
FOUR_HEADS = {"vocab": 64}

DENSE_4: dict[str, dict[str, Any]] = {
    "tp_pp": SPLIT | PIPED | WHOLE,
    "tp_fsdp_op_accumulated": SPLIT
    | SHARDED
    | {"activation_checkpointing": "op", "num_microbatches": 2, "gradient_sync": "last"},
    "tp_cp_full": SPLIT | RING | {"activation_checkpointing": "full"},
    "cp_fsdp_accumulated": RING | SHARDED | {"num_microbatches": 2},
    "cp_pp": RING | PIPED,
    "pp_fsdp_full": PIPED | SHARDED | {"activation_checkpointing": "full"},
    "pp_fsdp_uneven": PIPED | SHARDED | {"stage_blocks": [3, 1]},
    "tp_fsdp_full_first": SPLIT
    | SHARDED
    | {"activation_checkpointing": "full", "checkpoint_blocks": 1},
    "cp_pp_uneven_full_first": RING
    | PIPED
    | {"activation_checkpointing": "full", "checkpoint_blocks": 2, "stage_blocks": [3, 1]},
}
"""The other pairs are in parallel_layouts.py and pipeline_layouts.py."""
EXPERTS_4: dict[str, dict[str, Any]] = {
    "moe_tp_pp": SPLIT | PIPED | WHOLE,
    "moe_pp_fsdp_full_first": PIPED
    | SHARDED
    | {"activation_checkpointing": "full", "checkpoint_blocks": 1, "stage_blocks": [3, 1]},
    "ep_offload": EXPERT | {"dp_shard": 4, "offload": "cpu"},
    "ep_hsdp_reduce_scatter_only": EXPERT
    | SHARDED
    | COPIED
    | {"num_microbatches": 2, "gradient_sync": "reduce_scatter_only"},
}
"""Pairs with ep are in expert_layouts.py."""
DENSE_8: dict[str, dict[str, Any]] = {
    "tp_pp_fsdp": SPLIT | PIPED | SHARDED,
    "tp_cp_fsdp": SPLIT | RING | SHARDED,
    "cp_pp_fsdp": RING | PIPED | SHARDED,
    "tp_hsdp": SPLIT | SHARDED | COPIED,
    "pp_hsdp": PIPED | SHARDED | COPIED,
    "cp_hsdp": RING | SHARDED | COPIED,
    "tp_cp_pp": SPLIT | RING | PIPED,
    "tp_pp_fsdp_uneven_op_first": SPLIT
    | PIPED
    | SHARDED
    | {"activation_checkpointing": "op", "checkpoint_blocks": 1, "stage_blocks": [3, 1]},
    "pp4_tp": SPLIT | PIPED | WHOLE | {"pp": 4, "num_microbatches": 4},
}
EXPERTS_8: dict[str, dict[str, Any]] = {
    "ep_tp_pp": EXPERT | SHARDED | SPLIT | PIPED,
    "ep_tp_fsdp": EXPERT | {"dp_shard": 4} | SPLIT,
    "ep_cp_hsdp": EXPERT | RING | SHARDED | COPIED,
}
DENSE_6: dict[str, dict[str, Any]] = {
    "tp3_fsdp": SPLIT | SHARDED | {"tp": 3},
    "pp3_fsdp": PIPED | SHARDED | {"pp": 3, "num_microbatches": 4},
    "cp3_fsdp": RING | SHARDED | {"cp": 3},
}

OF_WORLD: dict[int, tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]] = {
    4: (DENSE_4, EXPERTS_4),
    6: (DENSE_6, {}),
    8: (DENSE_8, EXPERTS_8),
}
"""World -> (layouts of the dense model, layouts of the one with experts)."""


def dense_model(world: int) -> dict[str, Any]:
    """Whose widths the degrees of that world divide."""
    return SIX_HEADS if world == 6 else FOUR_HEADS


def measure_all(out: Path) -> None:
    """Every layout of this world; rank 0 writes the results."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    dense, with_experts = OF_WORLD[world]
    results: dict[str, Any] = {}
    for layouts, model in ((dense, dense_model(world)), (with_experts, FOUR_HEADS | EXPERTS)):
        for name, layout in jobs.asked_of(layouts).items():
            text = plans.plan_text(model=model, **layout)
            results[name] = losses.measure(text, steps=STEPS)
    if dist.get_rank() == 0:
        results["dense"] = losses.reference(dense_model(world))
        asked = [("experts", layout) for layout in jobs.asked_of(with_experts).values()]
        results |= losses.references({"experts": FOUR_HEADS | EXPERTS} if asked else {}, asked)
    jobs.leave_with(results, out)
