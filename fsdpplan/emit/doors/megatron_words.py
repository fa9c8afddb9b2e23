"""Megatron-LM's word for each field of a layout and a training."""

from __future__ import annotations

from fsdpplan.emit.doors.words import Word
from fsdpplan.spec.layout import DDP_BUCKET_BYTES

WORDS = {
    "dp_replicate": Word(
        says="what is left of the world, or `--num-distributed-optimizer-instances`"
    ),
    "dp_shard": Word(says="the ranks of `--use-distributed-optimizer` or `--use-torch-fsdp2`"),
    "cp": Word(says="`--context-parallel-size`"),
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
    "optimizer": Word(
        says="`--optimizer adam`", values=("adamw",), why="its Muon and its states are its own"
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
    "headroom_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
    "fits_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
}
"""By field of Layout and Training."""
