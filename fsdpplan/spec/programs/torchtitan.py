"""torchtitan 0.3.0: its word for each field of a layout and a training, and what it cannot run.

Source: torchtitan 0.3.0 (PyPI): config/configs.py, distributed/fsdp.py,
distributed/pipeline_parallel.py (names of schedules, by torch's `get_schedule_class`; stages of a
V-shaped one), components/loss.py, models/llama3, models/qwen3.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.spec.layout import DDP_BUCKET_BYTES
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.programs.words import (
    Unsayable,
    Vocabulary,
    Word,
    split_loss_problems,
    trained_elsewhere,
)
from fsdpplan.spec.training import Dropout

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Names of torch's schedules: `get_schedule_class` of torch 2.13 reads them."""

WORDS = {
    "dp_replicate": Word(says="`data_parallel_replicate_degree`"),
    "dp_shard": Word(says="`data_parallel_shard_degree`"),
    "cp": Word(says="`context_parallel_degree`"),
    "cp_attention": Word(
        says="ring: torch's own", values=("ring",), why="its context parallelism is torch's ring"
    ),
    "tp": Word(says="`tensor_parallel_degree`"),
    "pp": Word(says="`pipeline_parallel_degree`"),
    "ep": Word(
        says="1: the module says dense models",
        values=(1,),
        why="the module says dense models",
    ),
    "experts_over_tp": Word(
        says="off: the module says dense models",
        values=(False,),
        why="the module says dense models",
    ),
    "sharding": Word(
        says="`fsdp`: it always wraps in `fully_shard`",
        values=("fsdp",),
        why="it always wraps in fully_shard",
    ),
    "reshard_after_forward": Word(
        says="`fsdp_reshard_after_forward`: always or never",
        values=("always", "never"),
        why="it has no group of ranks to reshard to",
    ),
    "gradient_sync": Word(says="`every`, with a pipeline `last`; others refused"),
    "wrap_blocks": Word(
        says="1: each block is a unit", values=(1,), why="each block is a unit of its own"
    ),
    "ddp_bucket_bytes": Word(
        says="DDP's default: it never uses DDP", values=(DDP_BUCKET_BYTES,), why="it has no DDP"
    ),
    "micro_batch": Word(
        says="`local_batch_size`, with a pipeline `pipeline_parallel_microbatch_size`"
    ),
    "num_microbatches": Word(says="by `global_batch_size`, with a pipeline by `local_batch_size`"),
    "schedule": Word(
        says="`pipeline_parallel_schedule`",
        values=("none", *SCHEDULES),
        why="it takes the schedules that torch's get_schedule_class knows",
    ),
    "virtual_stages": Word(says="by the parts of `module_fqns_per_model_part`"),
    "stage_blocks": Word(says="`module_fqns_per_model_part`"),
    "activation_checkpointing": Word(
        says="`FullAC`, `SelectiveAC` (op) or None",
        values=("none", "op", "full"),
        why="it has no policy for attention alone",
    ),
    "checkpoint_blocks": Word(
        says="all: its policies are of every block",
        values=("all",),
        why="its policies are of every block",
    ),
    "sequence_parallel": Word(says="`enable_sequence_parallel`"),
    "loss_parallel": Word(says="on with tp: its loss is always split there; refused otherwise"),
    "async_tp": Word(says="`enable_async_tensor_parallel`, with compile"),
    "offload": Word(says="`enable_cpu_offload`"),
    "compile": Word(says='`CompileConfig(enable=...)` of `["model"]`'),
    "loss_chunks": Word(says="`ChunkedLossWrapper.Config(num_chunks=...)`"),
    "seq_len": Word(says="`seq_len`"),
    "global_batch": Word(says="`global_batch_size`"),
    "precision": Word(
        says="`mixed_precision_param`; fp8: `Float8LinearConverter`, without the head",
        values=("bf16", "fp32", "fp8"),
        why="it has no loss scale",
    ),
    "reduce_dtype": Word(
        says="`mixed_precision_reduce`: float32",
        values=("fp32",),
        why="it reduces in float32",
    ),
    "param_dtype": Word(says="`dtype`: float32 or bfloat16"),
    "optimizer": Word(
        says="`default_adamw`",
        values=("adamw",),
        why="its Muon is written for other shards, and it has no 8-bit states",
    ),
    "precision_switch": Word(says="none", values=("none",), why="it converts a model once"),
    "gradient_compression": Word(says="none", values=("none",), why="it has no DDP hooks"),
    "dropout": Word(
        says="none",
        values=(None, Dropout()),
        why="its decoders drop nothing",
        instead="--dropout 0",
    ),
    "adapters": Word(
        says="none",
        values=(None,),
        why="its LoRA converter has no 4-bit base and is not spoken to here",
        instead="no --lora",
    ),
    "tokens": Word(says="`steps`, unless `--steps` is given"),
    "runtime": Word(says="`fsdp2`", values=("fsdp2",), why="torchtitan is FSDP2"),
    "fp8_recipe": Word(says="`recipe_name`: rowwise; idle without fp8"),
    "fp8_all_gather": Word(
        says="off: its converter has no such switch",
        values=(False,),
        why="its converter gathers in bf16",
    ),
    "torch": Word(says="idle: it is what is installed where it runs"),
    "program": Word(says="idle: it chose the plan, and the model is the target's own"),
    "packed": Word(says="either: its attention keeps documents apart, which are those of its data"),
    "mean_document_tokens": Word(says="idle: it chose the plan, and the data are the target's own"),
    "headroom_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
    "fits_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
}
"""By field of Layout and Training."""

_PLAIN = Model(
    name="",
    layers=1,
    hidden=2,
    ffn_hidden=2,
    heads=1,
    kv_heads=1,
    head_dim=2,
    vocab=2,
)
"""A decoder like Llama 3, to compare with."""

LLAMA_FACTOR = 8
"""Of its rotary positions' `scaling="llama"` (torchtitan/models/common/rope.py)."""

_SAID = frozenset(
    {
        "name",
        "layers",
        "hidden",
        "ffn_hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab",
        "vocab_multiple",
        "max_positions",
        "tied_embeddings",
        "qk_norm",
        "rope_theta",
        "rope_scaling",
        "norm_epsilon",
        "norm_bias",
    }
)
"""Fields of a model that the module says, or (norm_bias) that mean nothing to RMSNorm."""


def _of_question(case: Case) -> Iterator[Unsayable]:
    """What of the model is neither Llama 3's nor Qwen 3's, and what of all else it cannot run."""
    model, training, kind = case.model, case.training, case.cluster.device.kind
    if kind != "cuda":
        yield Unsayable(
            what="other devices than GPUs",
            words=f"devices of kind {kind} (it trains on GPUs): plan for GPUs",
        )
    unlike = [
        name
        for name in Model.__dataclass_fields__
        if name not in _SAID and getattr(model, name) != getattr(_PLAIN, name)
    ]
    scaling = model.rope_scaling
    if scaling is not None and not (
        model.is_scaled_as_llama and scaling.factor == LLAMA_FACTOR and not model.qk_norm
    ):
        unlike.append("rope_scaling")
    if unlike:
        yield Unsayable(
            what="models that are not dense decoders like Llama 3 and Qwen 3",
            words=f"{' and '.join(unlike)} of model {model.name} (it has dense decoders like "
            "Llama 3 and Qwen 3): " + trained_elsewhere(model),
        )
    if training.precision == "fp8" and training.fp8_recipe != "rowwise":
        yield Unsayable(
            what="fp8 scales that are not of rows",
            words=f"fp8_recipe {training.fp8_recipe} (it has rowwise): use --fp8-recipe rowwise",
        )


def _of_layout(case: Case) -> Iterator[Unsayable]:
    layout, training = case.layout, case.training
    sync = "last" if layout.pp > 1 else "every"
    if layout.num_microbatches > 1 and layout.gradient_sync != sync:
        yield Unsayable(
            what="gradients reduced in other micro-batches",
            words=f"gradient_sync {layout.gradient_sync} (it reduces gradients "
            f"{'after the last' if layout.pp > 1 else 'in every'} micro-batch): plan again with "
            f"--gradient-sync {sync}",
        )
    yield from split_loss_problems(layout)
    if layout.async_tp and not layout.compile:
        yield Unsayable(
            what="async_tp without compile", words="async_tp without compile: use --compile"
        )
    if layout.pp > 1 and case.model.tied_embeddings:
        yield Unsayable(
            what="a pipeline with tied embeddings",
            words=f"pp {layout.pp} with tied embeddings (it refuses them): use --pp 1",
        )
    pieces = layout.loss_chunks * layout.cp
    if layout.loss_chunks > 1 and training.seq_len % pieces:
        yield Unsayable(
            what="unequal pieces of the loss",
            words=f"loss_chunks {layout.loss_chunks} of {training.seq_len // layout.cp} tokens "
            "(its pieces are equal): use a divisor",
        )


TORCHTITAN = Vocabulary(words=WORDS, of_question=_of_question, of_layout=_of_layout)
"""What it can say."""
