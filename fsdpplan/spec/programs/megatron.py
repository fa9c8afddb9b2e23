"""Megatron-LM: its word for each field of a layout and a training, and what it cannot run.

Source: NVIDIA/Megatron-LM d98e8a64 megatron/training/arguments.py, core/transformer/
transformer_config.py, core/distributed/torch_fully_sharded_data_parallel.py (no dtype of its own,
no `no_sync`), core/transformer/transformer_block.py (`_checkpointed_forward`: block recomputes the
first layers); NVIDIA/Megatron-LM issue 2357 (masks of documents are not read).
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.spec.layout import DDP_BUCKET_BYTES
from fsdpplan.spec.model import Experts, Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.programs.words import (
    Unsayable,
    Vocabulary,
    Word,
    split_loss_problems,
    trained_elsewhere,
)
from fsdpplan.spec.training import Dropout

WORDS = {
    "dp_replicate": Word(
        says="what is left of the world, or `--num-distributed-optimizer-instances`"
    ),
    "dp_shard": Word(says="the ranks of `--use-distributed-optimizer` or `--use-torch-fsdp2`"),
    "cp": Word(says="`--context-parallel-size`"),
    "cp_attention": Word(
        says="ring: `--cp-comm-type p2p`, its default",
        values=("ring",),
        why="its exchange of heads is not priced",
    ),
    "tp": Word(says="`--tensor-model-parallel-size`"),
    "pp": Word(says="`--pipeline-model-parallel-size`"),
    "ep": Word(says="`--expert-model-parallel-size`"),
    "experts_over_tp": Word(
        says="`--expert-tensor-parallel-size 1`, and ep x tp expert-parallel ranks"
    ),
    "sharding": Word(
        says="nothing (ddp), `--use-distributed-optimizer` (zero1), `--use-torch-fsdp2` (fsdp, "
        "without a pipeline or replicas)",
        values=("ddp", "zero1", "fsdp"),
        why="its ZeRO-2 is Megatron-FSDP's, with units and dtypes of its own",
    ),
    "reshard_after_forward": Word(
        says="`--torch-fsdp2-no-reshard-after-forward`, with fsdp",
        values=("always", "never"),
        why="it has no group of ranks to reshard to",
    ),
    "gradient_sync": Word(says="`last`, with fsdp `every`; others refused"),
    "wrap_blocks": Word(
        says="1: each layer is a unit", values=(1,), why="each layer is a unit of its own"
    ),
    "ddp_bucket_bytes": Word(
        says="its own buckets", values=(DDP_BUCKET_BYTES,), why="it has buckets of its own"
    ),
    "micro_batch": Word(says="`--micro-batch-size`"),
    "num_microbatches": Word(says="by `--global-batch-size`"),
    "schedule": Word(
        says="1f1b, and interleaved_1f1b by the stages of the layout",
        values=("none", "1f1b", "interleaved_1f1b"),
        why="it has 1F1B and its interleaved kind",
    ),
    "virtual_stages": Word(says="by the stages of `--pipeline-model-parallel-layout`"),
    "stage_blocks": Word(says="`--pipeline-model-parallel-layout`"),
    "activation_checkpointing": Word(
        says="`--recompute-granularity`: full, or selective of core_attn (attention)",
        values=("none", "attention", "full"),
        why="it recomputes whole layers or named modules",
    ),
    "checkpoint_blocks": Word(
        says="`--recompute-method block` and `--recompute-num-layers`, with full"
    ),
    "sequence_parallel": Word(says="`--sequence-parallel`"),
    "loss_parallel": Word(says="on with tp: its loss is always split there; refused otherwise"),
    "async_tp": Word(says="`--tp-comm-overlap`, with `--sequence-parallel`"),
    "offload": Word(
        says="none",
        values=("none",),
        why="it can keep optimizer states on the host, not parameters",
    ),
    "compile": Word(says="idle: its own fused kernels stand where compiled ones would"),
    "loss_chunks": Word(says="1", values=(1,), why="its loss is in one piece"),
    "seq_len": Word(says="`--seq-length`"),
    "global_batch": Word(says="`--global-batch-size`"),
    "precision": Word(
        says="`--bf16`, `--fp16`, neither (fp32), or `--fp8-format hybrid`",
    ),
    "reduce_dtype": Word(
        says="`--accumulate-allreduce-grads-in-fp32` or `--grad-reduce-in-bf16`; with fsdp that of "
        "the parameters"
    ),
    "param_dtype": Word(
        says="fp32: its optimizer keeps masters",
        values=("fp32",),
        why="its optimizer keeps fp32 masters of bf16 parameters",
    ),
    "optimizer": Word(
        says="`--optimizer adam`", values=("adamw",), why="its Muon and its states are its own"
    ),
    "precision_switch": Word(says="none", values=("none",), why="it has no such change in a run"),
    "gradient_compression": Word(says="none", values=("none",), why="its DDP has no such hooks"),
    "dropout": Word(
        says="none",
        values=(None, Dropout()),
        why="it is priced without",
        instead="--dropout 0",
    ),
    "adapters": Word(
        says="none",
        values=(None,),
        why="Megatron-LM has no adapters; Megatron-Bridge has",
        instead="no --lora",
    ),
    "tokens": Word(says="`--train-iters`, unless `--steps` is given"),
    "runtime": Word(
        says="`megatron` (with overlaps), `megatron_lm` (its defaults), `fsdp2` (with a warning)",
        values=("megatron", "megatron_lm", "fsdp2"),
        why="Megatron-LM of today is another program",
    ),
    "fp8_recipe": Word(
        says="`--fp8-recipe`: tensorwise or delayed; idle without fp8",
        values=("tensorwise", "delayed"),
        why="Transformer Engine has no scales a row",
    ),
    "fp8_all_gather": Word(
        says="off",
        values=(False,),
        why="its --fp8-param-gather keeps the parameters themselves in fp8",
    ),
    "torch": Word(says="idle: it is what is installed where it runs"),
    "program": Word(says="idle: it chose the plan, and the model is the target's own"),
    "packed": Word(
        says="off",
        values=(False,),
        instead="--no-pack",
        why="its attention is Transformer Engine's, which is causal and reads no mask, that of "
        "--reset-attention-mask neither",
    ),
    "mean_document_tokens": Word(says="none: packed is refused"),
    "headroom_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
    "fits_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
}
"""By field of Layout and Training."""

_UNSAID = {
    "qk_norm_width": "head",
    "post_norms": False,
    "embedding_norm": False,
    "attention_sinks": False,
    "sliding_window": 0,
    "full_attention_every": 1,
    "latent": None,
    "window_kind": "sliding",
    "attention_gate": False,
    "mixers": "",
    "networks": "",
}
"""Fields of a model that the arguments say in one way only."""


def _of_question(case: Case) -> Iterator[Unsayable]:
    """What of the model the arguments do not say, and what of all else it cannot run."""
    model, training, kind = case.model, case.training, case.cluster.device.kind
    unlike = [name for name, value in _UNSAID.items() if getattr(model, name) != value]
    unlike += [] if model.mlp in ("swiglu", "gelu") else ["mlp"]
    unlike += [] if model.positions in ("rope", "learned") else ["positions"]
    unlike += [] if model.norm == "rmsnorm" or model.norm_bias else ["norm_bias"]
    unlike += [] if bias_flags(model) is not None else ["biases"]
    if model.positions == "rope" and not float(model.rope_theta).is_integer():
        unlike.append("rope_theta")
    unlike += [] if model.is_scaled_as_llama else ["rope_scaling"]
    if model.experts and (model.experts.bias or model.experts.router_bias):
        unlike.append("experts")
    if model.experts and not _routes_alike(model.experts):
        unlike.append("experts.router")
    if unlike:
        yield Unsayable(
            what="models that are not like Llama, Qwen and GPT",
            words=f"{' and '.join(unlike)} of model {model.name} (this script writes out models "
            "like Llama, Qwen and GPT): " + trained_elsewhere(model),
        )
    if kind != "cuda":
        yield Unsayable(
            what="other devices than GPUs",
            words=f"devices of kind {kind} (it trains on GPUs): plan for GPUs",
        )
    if training.precision in ("fp16", "fp32") and training.reduce_dtype != "fp32":
        yield Unsayable(
            what="gradients reduced in bf16 beside another precision",
            words=f"reduce_dtype bf16 with precision {training.precision}: use --reduce-dtype fp32",
        )


def bias_flags(model: Model) -> tuple[str, ...] | None:
    """Flags for the biases of projections; None: there are none for these."""
    match (model.attention_bias, model.attention_output_bias, model.mlp_bias):
        case (False, False, False):
            return ("--disable-bias-linear",)
        case (True, False, False):
            return ("--disable-bias-linear", "--add-qkv-bias")
        case (True, True, True):
            return ()
    return None


def _routes_alike(experts: Experts) -> bool:
    """Megatron adds up the best `active / groups_chosen` scores of a group, and divides sigmoids of
    several experts by their sum.

    Source: Megatron Core 0.14, transformer/moe/moe_utils.py.
    """
    router = experts.router
    groups = router.groups == 1 or router.group_best == experts.active // router.groups_chosen
    return groups and (router.scores == "softmax" or router.normalised == (experts.active > 1))


def _of_layout(case: Case) -> Iterator[Unsayable]:
    layout = case.layout
    sync = "every" if layout.sharding == "fsdp" else "last"
    if layout.num_microbatches > 1 and layout.gradient_sync != sync:
        yield Unsayable(
            what="gradients reduced in other micro-batches",
            words=f"gradient_sync {layout.gradient_sync} with sharding {layout.sharding} (it "
            f"reduces {'in every' if sync == 'every' else 'after the last'} micro-batch): plan "
            f"again with --gradient-sync {sync}",
        )
    yield from split_loss_problems(layout)
    if layout.activation_checkpointing == "attention" and layout.checkpoint_blocks != "all":
        yield Unsayable(
            what="selective recomputation of some layers",
            words=f"checkpoint_blocks {layout.checkpoint_blocks} with activation_checkpointing "
            "attention (its selective recomputation is of all layers): use --checkpoint-blocks all",
        )
    if layout.async_tp and not layout.sequence_parallel:
        yield Unsayable(
            what="async_tp without sequence_parallel",
            words="async_tp without sequence_parallel: use --sequence-parallel",
        )
    if layout.sharding == "fsdp":
        yield from _fsdp(case)
    elif layout.reshard_after_forward != "always":
        yield Unsayable(
            what="reshard_after_forward without FSDP",
            words=f"reshard_after_forward with sharding {layout.sharding}: leave it out",
        )


def _fsdp(case: Case) -> Iterator[Unsayable]:
    layout, training = case.layout, case.training
    for name in ("pp", "ep", "dp_replicate"):
        if (degree := getattr(layout, name)) > 1:
            yield Unsayable(
                what=f"FSDP with {name}",
                words=f"sharding fsdp with {name} {degree} (its --use-torch-fsdp2 goes without): "
                f"use --{name.replace('_', '-')} 1, or --sharding zero1",
            )
    if case.model.tied_embeddings:
        yield Unsayable(
            what="FSDP with tied embeddings",
            words="sharding fsdp with tied embeddings (it refuses them): use --sharding zero1",
        )
    if training.precision == "fp16":
        yield Unsayable(
            what="FSDP in fp16",
            words="sharding fsdp with precision fp16 (it refuses it): use --precision bf16",
        )
    if training.precision in ("bf16", "fp8") and training.reduce_dtype != "bf16":
        yield Unsayable(
            what="FSDP that reduces in fp32",
            words="reduce_dtype fp32 with sharding fsdp (its FSDP2 reduces in the parameters' "
            "bf16): use --reduce-dtype bf16",
        )


MEGATRON = Vocabulary(words=WORDS, of_question=_of_question, of_layout=_of_layout)
"""What it can say."""
