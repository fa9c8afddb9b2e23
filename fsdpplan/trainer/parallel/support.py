"""What this trainer can run. Everything else is refused in words, never ignored.

What tensor and context parallelism ask of a plan.

Pipeline rules: what torch's schedules cannot run, in words.

Read in torch 2.13's torch/distributed/pipelining/schedules.py and tried (see the tests).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec

from ..config import (
    AdaptersConfig,
    DropoutConfig,
    LayoutConfig,
    ModelConfig,
    PlanConfig,
    RopeScalingConfig,
    TrainingConfig,
)
from ..errors import TrainerError
from ..model.adapters import target_widths
from ..precision import SWITCHED, parsed_switch
from ..torch_versions import lacking
from .pipeline_stages import SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, rank_shares


def parallel_problems(plan: PlanConfig) -> Iterator[str]:
    """What this trainer cannot run of a plan's tensor and context parallelism, in words."""
    layout = plan.layout
    if layout.tp > 1:
        yield from _tensor_parallel_problems(plan)
    else:
        for name in ("sequence_parallel", "loss_parallel", "async_tp"):
            if getattr(layout, name):
                yield f"{name} (it needs tensor parallelism)"
    if layout.cp > 1:
        yield from _context_parallel_problems(plan)


def _tensor_parallel_problems(plan: PlanConfig) -> Iterator[str]:
    model, layout = plan.model, plan.layout
    if not layout.sequence_parallel:
        yield f"tp {layout.tp} without sequence_parallel (it works with it)"
    if layout.async_tp and not layout.compile:
        yield "async_tp without compile (it is a pass of torch.compile)"
    peerless = plan.cluster.peerless_level(layout.tp) if layout.async_tp else None
    if peerless is not None:
        yield (
            f"async_tp over {peerless.name} (tp {layout.tp}): it needs symmetric memory, "
            "and these GPUs cannot map each other's; leave --async-tp out"
        )
    widths = {
        "heads": model.heads,
        "key/value heads": layout.tp if model.latent else model.kv_heads,
        "tokens a rank": plan.training.seq_len // layout.cp,
    }
    if any(not model.has_experts(layer) for layer in range(model.layers)):
        widths["feed-forward width"] = model.ffn_hidden
    for name, width in widths.items():
        if width % layout.tp:
            yield f"tp {layout.tp} with {name} of {width} (a divisor of it works)"


def _context_parallel_problems(plan: PlanConfig) -> Iterator[str]:
    model, layout, length = plan.model, plan.layout, plan.training.seq_len
    if layout.sharding == "ddp":
        yield f"sharding ddp with cp {layout.cp} (fsdp works)"
    if plan.trades_heads:
        if length % layout.cp:
            yield f"cp {layout.cp} with sequences of {length} (a divisor of it works)"
        return
    if length % (2 * layout.cp):
        yield f"cp {layout.cp} with sequences of {length} (twice cp must divide it)"
    if plan.training.packed:
        yield f"ring attention (cp {layout.cp}) with packed documents"
    if any(0 < model.window(layer) < length for layer in range(model.layers)):
        yield f"ring attention (cp {layout.cp}) with sliding windows"
    if model.attention_sinks:
        yield f"ring attention (cp {layout.cp}) with attention sinks"
    if plan.training.dropout is not None and plan.training.dropout.attention:
        yield f"ring attention (cp {layout.cp}) with dropout of attention (ulysses works)"


ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")
ROUND_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Micro-batches go through them in equal rounds of about pp."""

SCHEDULES = (*ONE_STAGE_SCHEDULES, *ROUND_SCHEDULES, "looped_bfs", *V_SCHEDULES)


def pipeline_problems(plan: PlanConfig) -> list[str]:
    """What of the plan's pipeline cannot run."""
    layout = plan.layout
    if layout.pp == 1:
        if layout.schedule == "none" and layout.virtual_stages == 1 and not layout.stage_blocks:
            return []
        return [
            f"schedule {layout.schedule} with {layout.virtual_stages} virtual stages and pp 1 "
            "(without a pipeline: none, 1 and no stage_blocks)"
        ]
    if layout.schedule not in SCHEDULES:
        works = ", ".join(SCHEDULES)
        return [f"schedule {layout.schedule} with pp {layout.pp} ({works} work)"]
    return [
        *_stage_problems(plan),
        *_micro_batch_problems(layout),
        *_pipeline_policy_problems(layout),
    ]


def _stage_problems(plan: PlanConfig) -> Iterator[str]:
    layout, layers = plan.layout, plan.model.layers
    virtual, stages = layout.virtual_stages, layout.pp * layout.virtual_stages
    needed = 1 if layout.schedule in ONE_STAGE_SCHEDULES else 2
    if needed != virtual and layout.schedule in (*ONE_STAGE_SCHEDULES, *V_SCHEDULES):
        yield f"schedule {layout.schedule} with virtual_stages {virtual} ({needed} works)"
        return
    blocks = layout.stage_blocks
    if not blocks:
        yield (
            f"pp {layout.pp} of a plan that does not name the blocks of its {stages} stages, as "
            "older plans do not (what fsdpplan emit-launch writes of them names them)"
        )
    elif len(blocks) != stages or sum(blocks) != layers:
        yield (
            f"stage_blocks {list(blocks)} for {stages} stages and {layers} blocks (one number a "
            "stage, which add up to all blocks)"
        )
    elif not all(_has_parameters(plan, rank) for rank in range(layout.pp)):
        yield f"stage_blocks {list(blocks)} (each rank needs a block, the embedding or the head)"


def _has_parameters(plan: PlanConfig, pp_rank: int) -> bool:
    shares = rank_shares(plan, pp_rank=pp_rank)
    return any(share.blocks or share.is_first or share.is_last for share in shares)


def _micro_batch_problems(layout: LayoutConfig) -> Iterator[str]:
    number, pp = layout.num_microbatches, layout.pp
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(layout.schedule, 1)
    if number < least:
        yield f"schedule {layout.schedule} with {number} micro-batches (at least {least} work)"
    rounds = max(1, number // pp)
    if layout.schedule in ROUND_SCHEDULES and number % rounds:
        yield (
            f"schedule {layout.schedule} with {number} micro-batches (they go in {rounds} rounds: "
            f"a multiple of {rounds} works)"
        )


def _pipeline_policy_problems(layout: LayoutConfig) -> Iterator[str]:
    if layout.gradient_sync != "last":
        yield (
            f"gradient_sync {layout.gradient_sync} with pp {layout.pp} (last works: schedules "
            "reduce after the last micro-batch)"
        )
    if layout.sharding == "fsdp" and layout.reshard_after_forward != "never":
        reshard = layout.reshard_after_forward
        yield f"reshard_after_forward {reshard} with pp {layout.pp} (never works)"
    if layout.schedule not in SPLIT_BACKWARD_SCHEDULES:
        return
    if layout.activation_checkpointing == "op":
        yield (
            f"activation_checkpointing op with schedule {layout.schedule}, which splits backward "
            "(none, attention and full work)"
        )
    if layout.compile:
        yield f"compile with schedule {layout.schedule}, which splits backward (--no-compile works)"


def require_runnable(plan: PlanConfig) -> None:
    """Raise TrainerError naming the first setting that this trainer cannot run."""
    problems = (
        *_model_problems(plan.model, plan.training),
        *_training_problems(plan.training, plan.layout),
        *_expert_problems(plan.model, plan.layout),
        *parallel_problems(plan),
        *pipeline_problems(plan),
        *_policy_problems(plan.layout),
        *_recomputation_problems(plan.layout),
        *_adapter_problems(plan),
    )
    if plan.cluster.device.kind not in ("cuda", "cpu"):
        problems = (*problems, f"device kind {plan.cluster.device.kind} (cuda and cpu work)")
    # asked only of a plan that is sound
    problems = problems or tuple(lacking(plan))
    if problems:
        raise TrainerError(
            f"this trainer cannot run {'; '.join(problems)}. Plan again with these pinned"
        )


def _one_of(name: str, value: object, *choices: str) -> list[str]:
    works = " and ".join(choices) + (" work" if len(choices) > 1 else " works")
    return [] if value in choices else [f"{name} {value} ({works})"]


def _model_problems(model: ModelConfig, training: TrainingConfig) -> list[str]:
    problems = [
        *_one_of("model.mlp", model.mlp, "swiglu", "geglu", "gelu"),
        *_one_of("model.norm", model.norm, "rmsnorm", "layernorm"),
        *_one_of("model.positions", model.positions, "rope", "learned", "alibi"),
        *_one_of("model.qk_norm_width", model.qk_norm_width, "head", "all_heads"),
        *_block_problems(model, training),
    ]
    if model.heads % model.kv_heads:
        problems.append(f"{model.kv_heads} key/value heads for {model.heads} query heads")
    if model.positions == "rope" and model.head_dim % 2:
        problems.append(f"rotary positions with an odd head_dim {model.head_dim}")
    if model.positions == "rope" and model.latent and model.latent.rope_head_dim % 2:
        problems.append(f"rotary positions with an odd rope_head_dim {model.latent.rope_head_dim}")
    if model.positions == "rope" and model.rope_scaling is not None:
        problems += _scaling_problems(model.rope_scaling, training)
    if model.positions == "learned" and training.seq_len > model.max_positions:
        problems.append(
            f"sequences of {training.seq_len} with {model.max_positions} learned positions"
        )
    return problems


def _block_problems(model: ModelConfig, training: TrainingConfig) -> list[str]:
    """Kinds of blocks that the decoder here has not."""
    problems = [
        f"{words} blocks (mixers {model.mixers}; attention in all works)"
        for letter, words in (("D", "gated delta rule"), ("M", "Mamba-2"))
        if letter in model.mixers
    ]
    if set(model.mixers) - set("ADM") or set(model.networks) - set("FE"):
        problems.append(
            f"mixers {model.mixers!r} with networks {model.networks!r} (attention and a network in "
            "each block work)"
        )
    if model.attention_gate:
        problems.append("a gate behind attention (attention_gate false works)")
    if model.latent is not None and model.latent.indexer is not None:
        problems.append("an indexer that chooses keys (latent attention without one works)")
    if model.window_kind != "sliding" and 0 < model.sliding_window < training.seq_len:
        problems.append(
            f"attention in chunks of {model.sliding_window} tokens (sequences up to that work)"
        )
    return problems


def _scaling_problems(scaling: RopeScalingConfig, training: TrainingConfig) -> list[str]:
    kinds = ("linear", "dynamic", "llama3", "yarn")
    problems = _one_of("model.rope_scaling.kind", scaling.kind, *kinds)
    is_longer = training.packed and training.seq_len > scaling.original_positions
    if scaling.kind == "dynamic" and is_longer:
        problems.append(
            f"dynamic rotary positions with packed sequences of {training.seq_len} tokens, which "
            f"are not the lengths of documents ({scaling.original_positions} work)"
        )
    return problems


def _training_problems(training: TrainingConfig, layout: LayoutConfig) -> list[str]:
    return [
        *_one_of("precision", training.precision, "bf16", "fp32", "fp16", "fp8"),
        *_one_of("reduce_dtype", training.reduce_dtype, "fp32", "bf16"),
        *_compression_problems(training, layout),
        *_switch_problems(training),
        *_one_of("param_dtype", training.param_dtype, "fp32", "bf16"),
        *(_half_parameter_problems(training) if training.param_dtype == "bf16" else []),
        *_one_of("optimizer", training.optimizer, "adamw", "adamw_8bit", "muon"),
        *_one_of("runtime", training.runtime, "fsdp2"),
        *(_fp8_problems(training, layout) if training.precision == "fp8" else []),
        *_optimizer_problems(training, layout),
        *(
            f"dropout {value} of {name} (below 1 works)"
            for name, value in asdict(training.dropout or DropoutConfig()).items()
            if value >= 1
        ),
    ]


def _switch_problems(training: TrainingConfig) -> list[str]:
    text = training.precision_switch
    if text == "none":
        return []
    problems = []
    if parsed_switch(text) is None:
        problems.append(f"precision_switch {text} (none, fp8@0.8 and bf16@0.1 work)")
    problems += _one_of(f"precision beside precision_switch {text}", training.precision, *SWITCHED)
    problems += _one_of(f"param_dtype beside precision_switch {text}", training.param_dtype, "fp32")
    if training.optimizer == "adamw_8bit":
        problems.append(f"precision_switch {text} with adamw_8bit (adamw and muon work)")
    if training.gradient_compression.startswith("powersgd"):
        problems.append(f"precision_switch {text} with {training.gradient_compression}")
    return problems


def _compression_problems(training: TrainingConfig, layout: LayoutConfig) -> list[str]:
    kind = training.gradient_compression
    if kind == "none":
        return []
    problems = []
    if layout.world == 1:
        problems.append(f"gradient_compression {kind} on one rank, which sends nothing (none)")
    if layout.sharding != "ddp":
        problems.append(f"gradient_compression {kind} with sharding {layout.sharding} (ddp works)")
    if max(layout.tp, layout.cp, layout.pp, layout.ep) > 1:
        problems.append(f"gradient_compression {kind} beside tp, cp, pp or ep (1 of each works)")
    if kind == "bf16":
        return problems + _one_of("reduce_dtype of bf16 compression", training.reduce_dtype, "bf16")
    if not re.fullmatch(r"powersgd:[1-9][0-9]*:[0-9]+", kind):
        problems.append(f"gradient_compression {kind} (none, bf16 and powersgd:1:1000 work)")
    if layout.num_microbatches > 1 and layout.gradient_sync != "last":
        problems.append(f"{kind} with gradient_sync {layout.gradient_sync} (last works)")
    if (training.param_dtype, training.reduce_dtype) != ("fp32", "fp32"):
        problems.append(f"{kind} of gradients that are not fp32 (fp32 works)")
    if training.precision == "fp16":
        problems.append(f"{kind} with precision fp16 (bf16 and fp32 work)")
    if find_spec("numpy") is None:
        problems.append(f"{kind} without numpy, which torch's hook imports (pip install numpy)")
    return problems


def _half_parameter_problems(training: TrainingConfig) -> list[str]:
    problems = []
    if training.precision != "bf16":
        problems.append(f"param_dtype bf16 with precision {training.precision} (bf16 works)")
    if training.optimizer == "muon":
        problems.append("param_dtype bf16 with optimizer muon (adamw and adamw_8bit work)")
    return problems


def _fp8_problems(training: TrainingConfig, layout: LayoutConfig) -> list[str]:
    problems = _one_of("fp8_recipe", training.fp8_recipe, "tensorwise", "rowwise")
    if training.fp8_all_gather and training.fp8_recipe != "tensorwise":
        problems.append(f"fp8_all_gather with fp8_recipe {training.fp8_recipe} (tensorwise works)")
    if training.fp8_all_gather and layout.sharding == "ddp":
        problems.append("fp8_all_gather with ddp (it gathers nothing)")
    return problems


def _optimizer_problems(training: TrainingConfig, layout: LayoutConfig) -> list[str]:
    if training.optimizer == "adamw" or layout.offload == "none":
        return []
    return [f"optimizer {training.optimizer} with offload {layout.offload} (adamw works)"]


def _expert_problems(model: ModelConfig, layout: LayoutConfig) -> list[str]:
    experts, ep = model.experts, layout.ep
    if layout.experts_over_tp:
        return ["experts_over_tp (it splits every expert by tp)"]
    if experts is None:
        return [f"ep {ep} with a dense model (it has no experts; 1 works)"] if ep > 1 else []
    problems = []
    for name, number in (("experts", experts.experts), ("dp_shard x cp", layout.shard_ranks)):
        if number % ep:
            problems.append(f"ep {ep} with {name} of {number} (a divisor of it works)")
    for name, width in (("expert", experts.hidden), ("shared experts", experts.shared_hidden)):
        if width % layout.tp:
            problems.append(f"tp {layout.tp} with {name} hidden of {width} (a divisor of it works)")
    if ep > 1 and not isinstance(layout.reshard_after_forward, str):
        problems.append(
            f"reshard_after_forward {layout.reshard_after_forward} with ep {ep} (always and never "
            "work: routed experts have another group of ranks)"
        )
    return problems


def _policy_problems(layout: LayoutConfig) -> list[str]:
    problems = [
        *_one_of("sharding", layout.sharding, "ddp", "fsdp"),
        *_one_of("gradient_sync", layout.gradient_sync, "every", "reduce_scatter_only", "last"),
        *_one_of("offload", layout.offload, "none", "cpu"),
    ]
    if layout.sharding == "ddp" and layout.dp_shard > 1:
        problems.append(f"sharding ddp with dp_shard {layout.dp_shard} (use dp_replicate)")
    if layout.sharding == "ddp" and layout.gradient_sync == "reduce_scatter_only":
        problems.append("gradient_sync reduce_scatter_only with ddp (every and last work)")
    if layout.sharding == "ddp" and layout.offload != "none":
        problems.append(f"offload {layout.offload} with ddp (it is FSDP2's)")
    reshard = layout.reshard_after_forward
    if isinstance(reshard, str):
        problems += _one_of("reshard_after_forward", reshard, "always", "never")
    elif layout.sharding == "fsdp" and layout.tp > 1:
        problems.append(
            f"reshard_after_forward {reshard} with tp {layout.tp} (always and never work: FSDP2 "
            "cannot keep parts of parameters that tensor parallelism has split)"
        )
    elif layout.sharding == "fsdp" and (reshard < 2 or layout.shard_ranks % reshard):
        problems.append(
            f"reshard_after_forward {reshard} over {layout.shard_ranks} ranks (a divisor of them "
            "above 1, always and never work)"
        )
    return problems


def _recomputation_problems(layout: LayoutConfig) -> list[str]:
    mode, number = layout.activation_checkpointing, layout.checkpoint_blocks
    problems = _one_of("activation_checkpointing", mode, "none", "attention", "op", "full")
    if isinstance(number, str):
        return [*problems, *_one_of("checkpoint_blocks", number, "all")]
    if mode == "none":
        problems.append(f"checkpoint_blocks {number} without activation_checkpointing (all works)")
    return problems


def _adapter_problems(plan: PlanConfig) -> Iterator[str]:
    """What of adapters and their base cannot be trained."""
    adapters, model, layout = plan.training.adapters, plan.model, plan.layout
    if adapters is None:
        return
    yield from _one_of("adapters.dtype", adapters.dtype, "fp32", "bf16")
    yield from _one_of("adapters.base", adapters.base, "bf16", "nf4")
    yield from _one_of("precision with adapters", plan.training.precision, "bf16", "fp32")
    yield from _one_of("precision_switch with adapters", plan.training.precision_switch, "none")
    yield from _one_of("param_dtype with adapters", plan.training.param_dtype, "fp32")
    if plan.training.optimizer == "muon":
        yield "adapters with optimizer muon (adamw and adamw_8bit work)"
    if plan.training.gradient_compression != "none":
        kind = plan.training.gradient_compression
        yield f"adapters with gradient_compression {kind} (none works)"
    if adapters.dropout >= 1:
        yield f"adapters.dropout {adapters.dropout} (below 1 works)"
    if model.experts is not None:
        yield "adapters beside routed experts (dense models work)"
    if model.latent is not None:
        yield "adapters in latent attention (matrices of queries, keys and values work)"
    if adapters.base == "nf4" and layout.tp > 1:
        yield f"a base in nf4 with tp {layout.tp} (a block of 64 weights is whole; 1 works)"
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        yield f"adapters with schedule {layout.schedule}, which splits backward (1f1b works)"
    if model.experts is None and model.latent is None:
        yield from _target_problems(adapters, model)


def _target_problems(adapters: AdaptersConfig, model: ModelConfig) -> Iterator[str]:
    widths = target_widths(model)
    found = [target for target in adapters.targets if target in widths]
    if not found:
        wanted = ", ".join(adapters.targets) or "none"
        yield f"adapters.targets {wanted}, of which the model has none ({', '.join(widths)} work)"
    for target in found:
        if adapters.rank > (most := min(widths[target])):
            yield f"adapters of rank {adapters.rank} beside {target}, whose least width is {most}"
            return
