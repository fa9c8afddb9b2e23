"""Plans for the trainer's tests: tiny decoders on CPU processes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from fsdpplan.cost.schedule.stages import balanced_stage_blocks, head_blocks
from fsdpplan.spec.model import Model
from fsdpplan.trainer.config import ModelConfig, parse_plan

MODEL: dict[str, Any] = {
    "name": "tiny",
    "layers": 4,
    "hidden": 48,
    "ffn_hidden": 96,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "vocab": 61,
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "max_positions": 64,
    "tied_embeddings": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "qk_norm": True,
    "rope_theta": 10000.0,
    "norm_epsilon": 1e-5,
}

GPT2_STYLE: dict[str, Any] = {
    "mlp": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "kv_heads": 4,
    "qk_norm": False,
    "tied_embeddings": True,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}

LAYOUT: dict[str, Any] = {
    "dp_replicate": 1,
    "dp_shard": 1,
    "cp": 1,
    "tp": 1,
    "pp": 1,
    "ep": 1,
    "sharding": "fsdp",
    "reshard_after_forward": "always",
    "gradient_sync": "every",
    "wrap_blocks": 1,
    "ddp_bucket_bytes": 25 * 2**20,
    "micro_batch": 1,
    "num_microbatches": 1,
    "schedule": "none",
    "virtual_stages": 1,
    "activation_checkpointing": "none",
    "sequence_parallel": False,
    "loss_parallel": False,
    "async_tp": False,
    "offload": "none",
    "compile": False,
}

GLOBAL_BATCH = 8


def plan_document(
    *,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    **layout: Any,
) -> dict[str, Any]:
    """The document of a plan of 8 sequences of 24 tokens a step; the micro-batch is what fits, and
    a pipeline's stages are named as plans name them."""
    chosen = {**LAYOUT, **layout}
    shapes = {**MODEL, **(model or {})}
    if chosen["pp"] > 1 and "stage_blocks" not in layout:
        stages = chosen["pp"] * chosen["virtual_stages"]
        chosen["stage_blocks"] = _stage_blocks(shapes, stages=stages)
    data_parallel = chosen["dp_replicate"] * chosen["dp_shard"]
    if "micro_batch" not in layout:
        chosen["micro_batch"] = GLOBAL_BATCH // data_parallel // chosen["num_microbatches"]
    world = data_parallel * chosen["tp"] * chosen["pp"] * chosen["cp"]
    return {
        "schema_version": 1,
        "model": shapes,
        "cluster": {
            "name": "cpu",
            "device": {
                "name": "cpu",
                "kind": "cpu",
                "peak_bf16_flops_per_second": 1e11,
                "peak_fp16_flops_per_second": 1e11,
                "peak_fp32_flops_per_second": 1e11,
                "multiprocessors": 1,
            },
            "gpus": world,
            "gpus_per_node": world,
            "levels": [],
        },
        "training": {
            "seq_len": 24,
            "global_batch": data_parallel * chosen["micro_batch"] * chosen["num_microbatches"],
            "precision": "fp32",
            "reduce_dtype": "fp32",
            "optimizer": "adamw",
            "tokens": None,
            "runtime": "fsdp2",
            "headroom_fraction": 0.08,
            **(training or {}),
        },
        "layout": chosen,
        "estimate": {"step_seconds": {"expected": 1.0}},
    }


def _stage_blocks(shapes: dict[str, Any], *, stages: int) -> list[int]:
    """Those by which such a plan is priced; none where there are more stages than blocks."""
    model = TypeAdapter(Model).validate_python(shapes)
    if stages > model.layers:
        return []
    return list(
        balanced_stage_blocks(layers=model.layers, stages=stages, head_blocks=head_blocks(model))
    )


def plan_text(**arguments: Any) -> str:
    """The JSON of `plan_document`."""
    return json.dumps(plan_document(**arguments))


def config_of(**fields: Any) -> ModelConfig:
    """The tiny model, changed, as the trainer reads it."""
    return parse_plan(plan_text(model=fields)).model


def config_of_model(model: Model) -> ModelConfig:
    """A planned model as the trainer reads it."""
    return parse_plan(json.dumps(plan_document() | {"model": asdict(model)})).model
