"""torchtitan 0.3.0's word for each field of a layout and a training."""

from __future__ import annotations

from fsdpplan.emit.doors.words import Word
from fsdpplan.spec.layout import DDP_BUCKET_BYTES

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
    "schedule": Word(says="`pipeline_parallel_schedule`"),
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
    "optimizer": Word(
        says="`default_adamw`",
        values=("adamw",),
        why="its Muon is written for other shards, and it has no 8-bit states",
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
    "headroom_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
    "fits_fraction": Word(says="idle: it chose the plan, and nothing runs by it"),
}
"""By field of Layout and Training."""
