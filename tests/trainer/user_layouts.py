"""Layouts of models of Hugging Face under `parallelize`, and what four ranks measure in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsdpplan.trainer.torch_versions import has_ring_attention
from tests.trainer import jobs

WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "wide llama": ("LlamaConfig", {"tie_word_embeddings": False, "intermediate_size": 64}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "pad_token_id": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
TP2 = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
SHARD4 = {"dp_shard": 4}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
DDP = {"dp_replicate": 4, "sharding": "ddp"}
TWICE = {"num_microbatches": 2}
FULL = {"activation_checkpointing": "full"}
OP = {"activation_checkpointing": "op"}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama fsdp": ("llama", SHARD4),
    "llama hsdp": ("llama", HSDP),
    "llama ddp": ("llama", DDP),
    "llama tp2": ("llama", TP2 | {"dp_shard": 2}),
    "llama tp2, logits gathered": ("llama", TP2 | {"dp_shard": 2, "loss_parallel": False}),
    "llama tp2 hsdp, full": ("llama", TP2 | FULL | {"dp_replicate": 2}),
    "llama tp2, op, twice": ("llama", TP2 | OP | TWICE | {"dp_shard": 2}),
    "llama fsdp, full, twice": ("llama", SHARD4 | FULL | TWICE | {"gradient_sync": "last"}),
    "qwen2 hsdp, op": ("qwen2", HSDP | OP),
    "qwen2 tp2": ("qwen2", TP2 | {"dp_shard": 2}),
    "qwen3 fsdp, never": ("qwen3", SHARD4 | {"reshard_after_forward": "never"}),
    "qwen3 tp2": ("qwen3", TP2 | {"dp_shard": 2, "wrap_blocks": 2}),
    "gemma3 tp2": ("gemma3", TP2 | {"dp_shard": 2}),
    "llama cp2": ("llama", {"cp": 2, "dp_shard": 2}),
    "llama cp4, full": ("llama", FULL | {"cp": 4}),
    "qwen2 cp2 tp2": ("qwen2", TP2 | {"cp": 2}),
    "mixtral cp2 hsdp": ("mixtral", {"cp": 2, "dp_replicate": 2}),
    "mixtral fsdp": ("mixtral", SHARD4),
    "mixtral hsdp, full": ("mixtral", HSDP | FULL),
}
"""Layouts of four ranks that must lose like one process."""
if not has_ring_attention():
    LAYOUTS = {name: case for name, case in LAYOUTS.items() if "cp" not in case[1]}

BF16: dict[str, dict[str, Any]] = {
    "bf16 llama fsdp": SHARD4,
    "bf16 llama tp2": TP2 | {"dp_shard": 2},
    "bf16 llama ddp": DDP,
}
"""Layouts of the llama in bf16."""

FP8: dict[str, dict[str, Any]] = {
    "fp8 llama fsdp": SHARD4,
    "fp8 llama tp2": TP2 | {"dp_shard": 2},
    "fp8 llama cp2, full": FULL | {"cp": 2, "dp_shard": 2},
}
"""Layouts of the llama in fp8, by emulated products."""
if not has_ring_attention():
    FP8 = {name: layout for name, layout in FP8.items() if "cp" not in layout}

LOADED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama fsdp": ("llama", SHARD4),
    "llama tp2": ("llama", TP2 | {"dp_shard": 2}),
    "qwen2 tp2 hsdp": ("qwen2", TP2 | {"dp_replicate": 2}),
    "gemma3 hsdp": ("gemma3", HSDP),
}
"""Layouts in which a model is built on the meta device and loaded from files."""


def measured_of(names: Iterable[str]) -> dict[str, Any]:
    """What four ranks measure of these cases."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "user.json"
        function = "tests.trainer.user_ranks:measure_all"
        return jobs.measured(4, function, out, asked=names, HF_HUB_OFFLINE="1")
