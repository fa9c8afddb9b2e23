"""What this trainer can run. Everything else is refused in words, never ignored."""

from __future__ import annotations

from .config import LayoutConfig, ModelConfig, PlanConfig, TrainingConfig
from .errors import TrainerError


def require_runnable(plan: PlanConfig) -> None:
    """Raise TrainerError naming the first setting that this trainer cannot run."""
    problems = (
        *_model_problems(plan.model, plan.training),
        *_training_problems(plan.training),
        *_degree_problems(plan.layout),
        *_policy_problems(plan.layout),
    )
    if plan.cluster.device.kind not in ("cuda", "cpu"):
        problems = (*problems, f"device kind {plan.cluster.device.kind} (cuda and cpu work)")
    if problems:
        raise TrainerError(
            f"this trainer cannot run {'; '.join(problems)}. Plan again with these pinned"
        )


def _one_of(name: str, value: object, *choices: str) -> list[str]:
    works = " and ".join(choices) + (" work" if len(choices) > 1 else " works")
    return [] if value in choices else [f"{name} {value} ({works})"]


def _model_problems(model: ModelConfig, training: TrainingConfig) -> list[str]:
    problems = [
        *_one_of("model.mlp", model.mlp, "swiglu", "gelu"),
        *_one_of("model.norm", model.norm, "rmsnorm", "layernorm"),
        *_one_of("model.positions", model.positions, "rope", "learned"),
    ]
    if model.heads % model.kv_heads:
        problems.append(f"{model.kv_heads} key/value heads for {model.heads} query heads")
    if model.positions == "rope" and model.head_dim % 2:
        problems.append(f"rotary positions with an odd head_dim {model.head_dim}")
    if model.positions == "learned" and training.seq_len > model.max_positions:
        problems.append(
            f"sequences of {training.seq_len} with {model.max_positions} learned positions"
        )
    return problems


def _training_problems(training: TrainingConfig) -> list[str]:
    return [
        *_one_of("precision", training.precision, "bf16", "fp32"),
        *_one_of("reduce_dtype", training.reduce_dtype, "fp32", "bf16"),
        *_one_of("optimizer", training.optimizer, "adamw"),
        *_one_of("runtime", training.runtime, "fsdp2"),
    ]


def _degree_problems(layout: LayoutConfig) -> list[str]:
    names = {
        "tp": "tensor parallelism",
        "pp": "pipeline parallelism",
        "cp": "context parallelism",
        "ep": "expert parallelism",
    }
    problems = [
        f"{words} ({axis} {getattr(layout, axis)}; only 1 works)"
        for axis, words in names.items()
        if getattr(layout, axis) > 1
    ]
    if layout.schedule != "none" or layout.virtual_stages > 1:
        problems.append(
            f"schedule {layout.schedule} with {layout.virtual_stages} virtual stages (none works)"
        )
    on = [
        name for name in ("sequence_parallel", "loss_parallel", "async_tp") if getattr(layout, name)
    ]
    return problems + [f"{name} (it needs tensor parallelism)" for name in on]


def _policy_problems(layout: LayoutConfig) -> list[str]:
    problems = [
        *_one_of("sharding", layout.sharding, "ddp", "fsdp"),
        *_one_of("activation_checkpointing", layout.activation_checkpointing, "none", "op", "full"),
        *_one_of("gradient_sync", layout.gradient_sync, "every", "reduce_scatter_only", "last"),
        *_one_of("offload", layout.offload, "none"),
    ]
    if layout.sharding == "ddp" and layout.dp_shard > 1:
        problems.append(f"sharding ddp with dp_shard {layout.dp_shard} (use dp_replicate)")
    if layout.sharding == "ddp" and layout.gradient_sync == "reduce_scatter_only":
        problems.append("gradient_sync reduce_scatter_only with ddp (every and last work)")
    reshard = layout.reshard_after_forward
    if isinstance(reshard, str):
        problems += _one_of("reshard_after_forward", reshard, "always", "never")
    elif layout.sharding == "fsdp" and (reshard < 2 or layout.dp_shard % reshard):
        problems.append(
            f"reshard_after_forward {reshard} with dp_shard {layout.dp_shard} (a divisor of it "
            "above 1, always and never work)"
        )
    return problems
