"""Hugging Face configs of decoders with RMSNorm, rotary positions and gated feed-forward networks.

Defaults of absent keys are those of the configuration classes of transformers 5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpplan.files.huggingface.fields import (
    GELU,
    SILU,
    activation,
    head_dim,
    optional_flag,
    optional_integer,
    optional_number,
    require_flag,
    rope_scaling,
    rope_theta,
    windows,
)
from fsdpplan.files.table import Table

Fields = dict[str, Any]
"""Fields of `Model`."""


def decoder(
    table: Table,
    notes: list[str],
    *,
    kv_heads: int | None,
    max_positions: int,
    epsilon: float = 1e-6,
    theta: float = 10000.0,
    partial: bool = False,
) -> Fields:
    """What the families share, with the family's defaults of absent keys."""
    heads = table.integer("num_attention_heads")
    activation(table, "hidden_act", SILU)
    if "num_key_value_heads" in table.values:
        kv_heads = None  # null: as many as query heads
    return {
        "layers": table.integer("num_hidden_layers"),
        "hidden": table.integer("hidden_size"),
        "ffn_hidden": table.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": optional_integer(table, "num_key_value_heads", kv_heads or heads),
        "vocab": table.integer("vocab_size"),
        "max_positions": optional_integer(table, "max_position_embeddings", max_positions),
        "tied_embeddings": optional_flag(table, "tie_word_embeddings", False),
        "norm_epsilon": optional_number(table, "rms_norm_eps", epsilon),
        "rope_theta": rope_theta(table, notes, default=theta, may_be_partial=partial),
        "rope_scaling": rope_scaling(table),
    }


def attention_bias(table: Table, default: bool = False) -> Fields:
    """`attention_bias` of all four projections."""
    bias = optional_flag(table, "attention_bias", default)
    return {"attention_bias": bias, "attention_output_bias": bias}


def all_windowed(table: Table, notes: list[str], *, default: int = 0) -> Fields:
    """Windows in each block: `sliding_window`; null: none."""
    window = default
    if "sliding_window" in table.values:
        window = optional_integer(table, "sliding_window", 0)
    layers = table.integer("num_hidden_layers")
    return windows(table, notes, window=window, layers=layers, full_every=layers + 1)


def qwen_windows(table: Table, notes: list[str]) -> Fields:
    """Windows from block `max_window_layers` on, with `use_sliding_window`."""
    if not optional_flag(table, "use_sliding_window", False):
        return {}
    layers = table.integer("num_hidden_layers")
    first = optional_integer(table, "max_window_layers", 28, lowest=0)
    if 0 < first < layers and table.values.get("layer_types") is None:
        raise table.wrong("max_window_layers", f"0 (all slide) or at least {layers} (none does)")
    window = optional_integer(table, "sliding_window", 4096)
    full_every = layers + 1 if first == 0 else 1
    return windows(table, notes, window=window, layers=layers, full_every=full_every)


def llama(table: Table, notes: list[str]) -> Fields:
    """Llama 1 to 3."""
    return (
        decoder(table, notes, kv_heads=None, max_positions=2048)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "mlp_bias": optional_flag(table, "mlp_bias", False)}
    )


def mistral(table: Table, notes: list[str]) -> Fields:
    """Mistral."""
    fields = decoder(table, notes, kv_heads=8, max_positions=131072)
    return fields | {"head_dim": head_dim(table)} | all_windowed(table, notes, default=4096)


def qwen2(table: Table, notes: list[str]) -> Fields:
    """Qwen 1.5, 2 and 2.5."""
    fields = decoder(table, notes, kv_heads=32, max_positions=32768)
    bias = {"head_dim": head_dim(table), "attention_bias": True}
    return fields | bias | qwen_windows(table, notes)


def qwen3(table: Table, notes: list[str]) -> Fields:
    """Qwen 3."""
    return (
        decoder(table, notes, kv_heads=32, max_positions=32768)
        | attention_bias(table)
        | {"head_dim": optional_integer(table, "head_dim", 128), "qk_norm": True}
        | qwen_windows(table, notes)
    )


def phi3(table: Table, notes: list[str]) -> Fields:
    """Phi 3 and 4: query, key and value in one matrix, gate and up in one."""
    fields = decoder(table, notes, kv_heads=None, max_positions=4096, epsilon=1e-5, partial=True)
    return fields | {"head_dim": head_dim(table)} | all_windowed(table, notes)


def olmo2(table: Table, notes: list[str]) -> Fields:
    """OLMo 2: norms behind attention and feed-forward, and on all heads' queries and keys."""
    notes.append(
        "the norms behind attention and feed-forward are counted as norms before them: the same "
        "parameters and work"
    )
    return (
        decoder(table, notes, kv_heads=None, max_positions=2048, epsilon=1e-5)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "qk_norm": True, "qk_norm_width": "all_heads"}
    )


def olmo3(table: Table, notes: list[str]) -> Fields:
    """OLMo 3: OLMo 2 with windows in three of four blocks."""
    layers = table.integer("num_hidden_layers")
    window = 4096
    if "sliding_window" in table.values:
        window = optional_integer(table, "sliding_window", 0)
    return olmo2(table, notes) | windows(table, notes, window=window, layers=layers, full_every=4)


def _gemma(table: Table, notes: list[str], *, kv_heads: int, max_positions: int = 8192) -> Fields:
    for key in ("hidden_activation", "hidden_act"):
        activation(table, key, GELU)
    plain = {key: value for key, value in table.values.items() if key != "hidden_act"}
    of_silu = Table(where=table.where, values=plain, prefix=table.prefix)
    fields = decoder(of_silu, notes, kv_heads=kv_heads, max_positions=max_positions)
    return (
        fields
        | attention_bias(table)
        | {
            "head_dim": optional_integer(table, "head_dim", 256),
            "mlp": "geglu",
            "tied_embeddings": optional_flag(table, "tie_word_embeddings", True),
        }
    )


def gemma(table: Table, notes: list[str]) -> Fields:
    """Gemma 1."""
    return _gemma(table, notes, kv_heads=16)


def gemma2(table: Table, notes: list[str]) -> Fields:
    """Gemma 2: every other block is windowed; norms before and behind."""
    layers = table.integer("num_hidden_layers")
    window = optional_integer(table, "sliding_window", 4096)
    if "sliding_window" in table.values:
        window = optional_integer(table, "sliding_window", 0)
    return (
        _gemma(table, notes, kv_heads=4)
        | {"post_norms": True}
        | windows(table, notes, window=window, layers=layers, full_every=2)
    )


def gemma3(table: Table, notes: list[str]) -> Fields:
    """Gemma 3's text model: five of six blocks are windowed; norms on queries and keys too."""
    require_flag(table, "use_bidirectional_attention", False, "only causal attention is planned")
    layers = table.integer("num_hidden_layers")
    window = 4096
    if "sliding_window" in table.values:
        window = optional_integer(table, "sliding_window", 0)
    every = optional_integer(table, "sliding_window_pattern", 6)
    return (
        _gemma(table, notes, kv_heads=4, max_positions=131072)
        | {"post_norms": True, "qk_norm": True, "rope_theta": rope_theta(table, [], default=1e6)}
        | windows(table, notes, window=window, layers=layers, full_every=every)
    )


GEMMA3_TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
"""What the text part of published Gemma 3 configs leaves to `Gemma3TextConfig`."""


def gemma3_with_vision(table: Table, notes: list[str]) -> Fields:
    """Gemma 3 from 4B on: the text model of a config that has a vision tower too."""
    return gemma3(replace(table, values=GEMMA3_TEXT_DEFAULTS | dict(table.values)), notes)
