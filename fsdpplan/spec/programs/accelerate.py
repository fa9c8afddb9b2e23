"""Hugging Face Accelerate 1.15.0: its word for each field of a layout and a training, and what it
cannot run.

Source: accelerate 1.15.0 (PyPI): parallelism_config.py (what goes together), utils/dataclasses.py
(`set_mixed_precision`: gradients reduced in the compute dtype), utils/fsdp_utils.py (units).
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.spec.layout import DDP_BUCKET_BYTES
from fsdpplan.spec.plan import Case
from fsdpplan.spec.programs.words import Unsayable, Vocabulary, Word
from fsdpplan.spec.training import Dropout

WORDS = {
    "dp_replicate": Word(says="`parallelism_config_dp_replicate_size`, or all processes (ddp)"),
    "dp_shard": Word(says="`parallelism_config_dp_shard_size`"),
    "cp": Word(says="`parallelism_config_cp_size`, by all-gather"),
    "cp_attention": Word(
        says="ring: torch's own", values=("ring",), why="its context parallelism is torch's ring"
    ),
    "tp": Word(says="`parallelism_config_tp_size`"),
    "pp": Word(says="1", values=(1,), why="it trains without pipelines"),
    "ep": Word(says="1", values=(1,), why="experts are placed by the script's model"),
    "experts_over_tp": Word(
        says="off", values=(False,), why="experts are placed by the script's model"
    ),
    "sharding": Word(
        says="`distributed_type`: FSDP (fsdp) or MULTI_GPU (ddp)",
        values=("fsdp", "ddp"),
        why="ZeRO-1 and ZeRO-2 are DeepSpeed's there",
    ),
    "reshard_after_forward": Word(
        says="`fsdp_reshard_after_forward`",
        values=("always", "never"),
        why="its FSDP2 takes true or false",
    ),
    "gradient_sync": Word(
        says="for the script: `sync_each_batch` of GradientAccumulationPlugin",
        values=("every", "last"),
        why="it postpones both reductions or none",
    ),
    "wrap_blocks": Word(
        says="1: each block is a unit", values=(1,), why="each block is a unit of its own"
    ),
    "ddp_bucket_bytes": Word(
        says="DDP's default", values=(DDP_BUCKET_BYTES,), why="the file has no word for it"
    ),
    "micro_batch": Word(says="for the script: the data loader's batch size"),
    "num_microbatches": Word(says="for the script: `num_steps` of GradientAccumulationPlugin"),
    "schedule": Word(says="none", values=("none",), why="it trains without pipelines"),
    "virtual_stages": Word(says="1", values=(1,), why="it trains without pipelines"),
    "stage_blocks": Word(says="none", values=((),), why="it trains without pipelines"),
    "activation_checkpointing": Word(
        says="`fsdp_activation_checkpointing`: full or none",
        values=("none", "full"),
        why="it recomputes whole blocks or nothing",
    ),
    "checkpoint_blocks": Word(
        says="all", values=("all",), why="it wraps every block that it recomputes"
    ),
    "sequence_parallel": Word(
        says="off",
        values=(False,),
        why="Transformers' plans for tp leave the sequence whole",
        instead="--tp 1",
    ),
    "loss_parallel": Word(
        says="off",
        values=(False,),
        why="Transformers' plans for tp gather the logits",
        instead="--tp 1",
    ),
    "async_tp": Word(says="off", values=(False,), why="it has no such pass"),
    "offload": Word(says="`fsdp_offload_params`"),
    "compile": Word(says="`dynamo_config`, by regions (blocks)"),
    "loss_chunks": Word(says="1", values=(1,), why="the loss is the script's model's"),
    "seq_len": Word(says="for the script: tokens a sequence"),
    "global_batch": Word(says="by the script's batch and steps"),
    "precision": Word(
        says="`mixed_precision`: bf16 or no (fp32)",
        values=("bf16", "fp32"),
        why="it would reduce fp16 gradients in fp16, and its fp8 converts other matmuls",
    ),
    "reduce_dtype": Word(says="that of `mixed_precision` (fsdp), fp32 (ddp); others refused"),
    "param_dtype": Word(
        says="fp32: it casts the model's parameters to it",
        values=("fp32",),
        why="under mixed precision it casts trainable parameters to fp32",
    ),
    "optimizer": Word(
        says="for the script: AdamW", values=("adamw",), why="the file has no word for it"
    ),
    "precision_switch": Word(says="none", values=("none",), why="its file says one precision"),
    "gradient_compression": Word(
        says="none", values=("none",), why="its hooks are of the script, not of the file"
    ),
    "dropout": Word(
        says="none",
        values=(None, Dropout()),
        why="it is a setting of the model that the script makes",
        instead="--dropout 0",
    ),
    "adapters": Word(
        says="none",
        values=(None,),
        why="adapters are PEFT's, in a script of one's own",
        instead="no --lora",
    ),
    "tokens": Word(says="for the script: steps"),
    "runtime": Word(
        says="`fsdp2`, with ddp also `autocast`",
        values=("fsdp2", "autocast"),
        why="it runs FSDP2 and DDP",
    ),
    "fp8_recipe": Word(says="idle without fp8"),
    "fp8_all_gather": Word(says="off", values=(False,), why="fp8 is refused"),
    "torch": Word(says="idle: it is what is installed where it runs"),
    "program": Word(says="idle: it chose the plan, and the model is the target's own"),
    "packed": Word(
        says="off",
        values=(False,),
        instead="--no-pack",
        why="the script and its attention are the user's",
    ),
    "mean_document_tokens": Word(says="none: packed is refused"),
    "headroom_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
    "fits_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
}
"""By field of Layout and Training."""


def _of_question(case: Case) -> Iterator[Unsayable]:
    kind = case.cluster.device.kind
    if kind != "cuda":
        yield Unsayable(
            what="other devices than GPUs",
            words=f"devices of kind {kind} (this file is for GPUs): plan for GPUs",
        )


def _of_layout(case: Case) -> Iterator[Unsayable]:
    layout, training = case.layout, case.training
    rows, vocab = case.model.vocab_rows(layout.tp), case.model.vocab
    if rows > vocab:
        yield Unsayable(
            what="vocabularies that a layout pads",
            words=f"a vocabulary of {vocab} padded to {rows} rows (your model has tables of its "
            "own): use --program hf, or --program own"
            + (", or --vocab-multiple 1" if vocab % layout.tp == 0 else ""),
        )
    if layout.sharding == "ddp":
        yield from _ddp(case)
        return
    if layout.shard_ranks == 1:
        yield Unsayable(
            what="sharding over one rank",
            words="sharding fsdp over one rank (it wants ranks to shard over): use --dp-shard 2",
        )
    elif layout.dp_shard == 1 and layout.dp_replicate > 1:
        yield Unsayable(
            what="copies of shards over context-parallel ranks alone",
            words=f"dp_replicate {layout.dp_replicate} with cp and dp_shard 1: use --dp-shard 2",
        )
    if training.runtime != "fsdp2":
        yield Unsayable(
            what="another runtime with FSDP",
            words=f"runtime {training.runtime} with sharding fsdp: use --runtime fsdp2",
        )
    compute = "fp32" if training.precision == "fp32" else "bf16"
    if training.reduce_dtype != compute:
        yield Unsayable(
            what="gradients reduced in another dtype than it computes in",
            words=f"reduce_dtype {training.reduce_dtype} with precision {training.precision} (it "
            f"reduces gradients in the dtype it computes in): use --reduce-dtype {compute}",
        )


def _ddp(case: Case) -> Iterator[Unsayable]:
    layout = case.layout
    if layout.tp > 1 or layout.cp > 1:
        yield Unsayable(
            what="DDP beside tensor or context parallelism",
            words=f"sharding ddp with tp {layout.tp} and cp {layout.cp}: use --sharding fsdp",
        )
    if case.training.reduce_dtype != "fp32" and layout.world > 1:
        yield Unsayable(
            what="DDP's gradients in bf16",
            words="reduce_dtype bf16 with ddp (its gradients are fp32): use --reduce-dtype fp32",
        )
    if layout.activation_checkpointing != "none":
        yield Unsayable(
            what="recomputation with DDP",
            words="activation_checkpointing full with ddp: use --activation-checkpointing none",
        )
    if layout.offload != "none" or layout.reshard_after_forward != "always":
        yield Unsayable(
            what="offload or resharding with DDP",
            words="offload or reshard_after_forward with ddp: leave them out",
        )


ACCELERATE = Vocabulary(words=WORDS, of_question=_of_question, of_layout=_of_layout)
"""What it can say."""
