"""Synonyms: what other programs of the field call the values of our options.

Sources: the ZeRO paper (arXiv 1910.02054) for stages 1 to 3; the names of FSDP1's sharding
strategies; torchtitan, Megatron-LM and PyTorch for schedules; PyTorch and safetensors for formats.
"""

from __future__ import annotations

SHARDING = {
    "zero3": "fsdp",
    "zero_3": "fsdp",
    "zero_2": "zero2",
    "zero_1": "zero1",
    "stage3": "fsdp",
    "fsdp2": "fsdp",
    "full_shard": "fsdp",
    "fully_shard": "fsdp",
    "stage2": "zero2",
    "stage1": "zero1",
    "os": "zero1",
    "zero0": "ddp",
    "no_shard": "ddp",
    "data_parallel": "ddp",
}

SCHEDULES = {
    "afab": "gpipe",
    "fill_drain": "gpipe",
    "one_f_one_b": "1f1b",
    "interleaved": "interleaved_1f1b",
    "vpp": "interleaved_1f1b",
    "bfs": "looped_bfs",
    "zb1p": "interleaved_zero_bubble",
    "zero_bubble": "interleaved_zero_bubble",
    "zb_v": "zbv",
    "zbv_zero_bubble": "zbv",
    "dualpipe_v": "dualpipev",
}

SELECTIVE = "selective"
"""Recomputation of a part of a block: of torchtitan every other matmul, of Megatron attention."""

CHECKPOINTING = {
    "off": "none",
    "no": "none",
    "false": "none",
    "block": "full",
    "all": "full",
    "on": "full",
    "true": "full",
    "core_attn": "attention",
    "per_op": "op",
    SELECTIVE: SELECTIVE,
}

CP_ATTENTION = {
    "a2a": "ulysses",
    "all_to_all": "ulysses",
    "p2p": "ring",
    "allgather": "ring",
}

FORMATS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8": "fp8",
}

BASES = {"bfloat16": "bf16", "4bit": "nf4", "qlora": "nf4"}

OPTIMIZERS = {"adam": "adamw", "adamw8bit": "adamw_8bit", "adam8bit": "adamw_8bit"}

OFFLOAD = {"off": "none", "no": "none", "false": "none", "on": "cpu", "true": "cpu", "host": "cpu"}
