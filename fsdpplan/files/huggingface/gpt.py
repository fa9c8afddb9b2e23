"""Hugging Face configs of decoders with LayerNorm and a feed-forward network without a gate.

Defaults of absent keys are those of the configuration classes of transformers 5.
"""

from __future__ import annotations

from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.huggingface.fields import (
    either,
    head_dim,
    note_partial,
    note_ungated,
    optional_flag,
    optional_integer,
    optional_number,
    require_flag,
    rope_scaling,
    rope_theta,
    split_width,
)
from fsdpplan.files.huggingface.llama import Fields, all_windowed
from fsdpplan.files.table import Table

PARALLEL_BLOCKS = (
    "attention and feed-forward that run side by side are planned and trained one after the other: "
    "the same parameters and work"
)


def _gpt(*, bias: bool) -> Fields:
    return {
        "mlp": "gelu",
        "norm": "layernorm",
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
    }


def _widths(table: Table, **keys: str) -> Fields:
    return {field: table.integer(key) for field, key in keys.items()}


def gpt2(table: Table, notes: list[str]) -> Fields:
    """GPT-2."""
    require_flag(table, "add_cross_attention", False, "only decoders are planned")
    note_ungated(table, notes, "activation_function", "gelu_new")
    widths = _widths(table, layers="n_layer", hidden="n_embd", heads="n_head", vocab="vocab_size")
    return (
        widths
        | _gpt(bias=True)
        | {
            "ffn_hidden": optional_integer(table, "n_inner", 4 * widths["hidden"]),
            "kv_heads": widths["heads"],
            "head_dim": split_width(table, "n_embd", "n_head"),
            "positions": "learned",
            "max_positions": optional_integer(table, "n_positions", 1024),
            "tied_embeddings": optional_flag(table, "tie_word_embeddings", True),
            "norm_epsilon": optional_number(table, "layer_norm_epsilon", 1e-5),
        }
    )


OPT_EXTRA_POSITIONS = 2
"""Rows of OPT's position table that no token has (`OPTLearnedPositionalEmbedding.offset`)."""


def opt(table: Table, notes: list[str]) -> Fields:
    """OPT, but for the 350M model, which has a narrower embedding and its norms behind."""
    hidden = table.integer("hidden_size")
    if optional_integer(table, "word_embed_proj_dim", hidden) != hidden:
        raise table.wrong("word_embed_proj_dim", f"hidden_size {hidden}")
    require_flag(table, "do_layer_norm_before", True, "norms stand before here")
    require_flag(table, "_remove_final_layer_norm", False, "a norm stands before the head here")
    require_flag(table, "layer_norm_elementwise_affine", True, "norms have weights here")
    note_ungated(table, notes, "activation_function", "relu")
    heads = table.integer("num_attention_heads")
    positions = optional_integer(table, "max_position_embeddings", 2048)
    return _gpt(bias=optional_flag(table, "enable_bias", True)) | {
        "layers": table.integer("num_hidden_layers"),
        "hidden": hidden,
        "ffn_hidden": table.integer("ffn_dim"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": split_width(table, "hidden_size", "num_attention_heads"),
        "vocab": table.integer("vocab_size"),
        "positions": "learned",
        "max_positions": positions + OPT_EXTRA_POSITIONS,
        "tied_embeddings": optional_flag(table, "tie_word_embeddings", True),
    }


def bloom(table: Table, notes: list[str]) -> Fields:
    """BLOOM: ALiBi, and a norm behind the embedding."""
    layers = either(table, "n_layer", "num_hidden_layers")
    heads_key = either(table, "n_head", "num_attention_heads")
    hidden_key = either(table, "n_embed", "hidden_size")
    hidden, heads = table.integer(hidden_key), table.integer(heads_key)
    return _gpt(bias=True) | {
        "layers": table.integer(layers),
        "hidden": hidden,
        "ffn_hidden": 4 * hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": split_width(table, hidden_key, heads_key),
        "vocab": table.integer("vocab_size"),
        "positions": "alibi",
        "max_positions": optional_integer(table, "seq_length", 2048),
        "tied_embeddings": optional_flag(table, "tie_word_embeddings", True),
        "embedding_norm": True,
        "norm_epsilon": optional_number(table, "layer_norm_epsilon", 1e-5),
    }


def mpt(table: Table, notes: list[str]) -> Fields:
    """MPT with ALiBi: no biases at all."""
    require_flag(table, "no_bias", True, "transformers builds MPT without biases")
    if optional_integer(table, "expansion_ratio", 4) != 4:
        raise table.wrong("expansion_ratio", "4: transformers builds MPT with no other")
    hidden, heads = table.integer("d_model"), table.integer("n_heads")
    if table.values.get("attn_config") is not None:
        attention = table.table("attn_config")
        require_flag(attention, "alibi", True, "transformers builds MPT without position table")
        require_flag(attention, "qk_ln", False, "transformers builds MPT without it")
        if attention.values.get("attn_type") is not None:
            attention.choice("attn_type", ("multihead_attention",))
    return _gpt(bias=False) | {
        "layers": table.integer("n_layers"),
        "hidden": hidden,
        "ffn_hidden": 4 * hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": split_width(table, "d_model", "n_heads"),
        "vocab": table.integer("vocab_size"),
        "positions": "alibi",
        "max_positions": optional_integer(table, "max_seq_len", 2048),
        "tied_embeddings": optional_flag(table, "tie_word_embeddings", True),
        "norm_bias": False,
        "norm_epsilon": optional_number(table, "layer_norm_epsilon", 1e-5),
    }


def _rotary(table: Table, *, kv_heads: int | None, max_positions: int = 4096) -> Fields:
    """What LayerNorm families with rotary positions share."""
    heads = table.integer("num_attention_heads")
    if "num_key_value_heads" in table.values:
        kv_heads = None  # null: as many as query heads
    return {
        "layers": table.integer("num_hidden_layers"),
        "hidden": table.integer("hidden_size"),
        "ffn_hidden": table.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": optional_integer(table, "num_key_value_heads", kv_heads or heads),
        "head_dim": head_dim(table),
        "vocab": table.integer("vocab_size"),
        "max_positions": optional_integer(table, "max_position_embeddings", max_positions),
    }


def gpt_neox(table: Table, notes: list[str]) -> Fields:
    """GPT-NeoX and Pythia."""
    note_ungated(table, notes, "hidden_act", "gelu")
    if optional_flag(table, "use_parallel_residual", True):
        notes.append(PARALLEL_BLOCKS)
    rotated = optional_number(table, "rotary_pct", 0.25)
    if rotated != 1.0:
        note_partial(notes, f"rotary_pct {rotated:g}")
    attention = optional_flag(table, "attention_bias", True)
    base = optional_number(table, "rotary_emb_base", 10000.0)
    plain = {key: value for key, value in table.values.items() if key != "num_key_value_heads"}
    shape = _rotary(Table(where=table.where, values=plain), kv_heads=None, max_positions=2048)
    return (
        shape
        | _gpt(bias=True)
        | {
            "attention_bias": attention,
            "attention_output_bias": attention,
            "tied_embeddings": optional_flag(table, "tie_word_embeddings", False),
            "rope_theta": rope_theta(table, notes, default=base, may_be_partial=True),
            "norm_epsilon": optional_number(table, "layer_norm_eps", 1e-5),
        }
    )


def starcoder2(table: Table, notes: list[str]) -> Fields:
    """StarCoder 2."""
    note_ungated(table, notes, "hidden_act", "gelu_pytorch_tanh")
    return (
        _rotary(table, kv_heads=2)
        | _gpt(bias=optional_flag(table, "use_bias", True))
        | {
            "tied_embeddings": optional_flag(table, "tie_word_embeddings", True),
            "rope_theta": rope_theta(table, notes),
            "rope_scaling": rope_scaling(table),
            "norm_epsilon": optional_number(table, "norm_epsilon", 1e-5),
        }
        | all_windowed(table, notes)
    )


def nemotron(table: Table, notes: list[str]) -> Fields:
    """Nemotron 3 and 4, Minitron."""
    note_ungated(table, notes, "hidden_act", "relu2")
    bias = optional_flag(table, "attention_bias", False)
    return (
        _rotary(table, kv_heads=None)
        | _gpt(bias=bias)
        | {
            "mlp_bias": optional_flag(table, "mlp_bias", False),
            "tied_embeddings": optional_flag(table, "tie_word_embeddings", False),
            "rope_theta": rope_theta(table, notes, may_be_partial=True),
            "norm_epsilon": optional_number(table, "norm_eps", 1e-5),
        }
    )


def falcon(table: Table, notes: list[str]) -> Fields:
    """Falcon 40B, 180B and RW; the 7B model has one norm a block and is refused."""
    is_new = optional_flag(table, "new_decoder_architecture", False)
    is_parallel = is_new or optional_flag(table, "parallel_attn", True)
    if is_parallel:
        _require_two_norms(table, is_new)
        notes.append(PARALLEL_BLOCKS)
    note_ungated(table, notes, "activation", "gelu")
    hidden_key = either(table, "n_embed", "hidden_size")
    hidden, heads = table.integer(hidden_key), table.integer("num_attention_heads")
    return _gpt(bias=optional_flag(table, "bias", False)) | {
        "layers": table.integer("num_hidden_layers"),
        "hidden": hidden,
        "ffn_hidden": optional_integer(table, "ffn_hidden_size", 4 * hidden),
        "heads": heads,
        "kv_heads": _falcon_kv_heads(table, heads, is_new),
        "head_dim": split_width(table, hidden_key, "num_attention_heads"),
        "vocab": table.integer("vocab_size"),
        "positions": "alibi" if optional_flag(table, "alibi", False) else "rope",
        "max_positions": optional_integer(table, "max_position_embeddings", 2048),
        "tied_embeddings": optional_flag(table, "tie_word_embeddings", True),
        "rope_theta": rope_theta(table, notes),
        "norm_epsilon": optional_number(table, "layer_norm_epsilon", 1e-5),
    }


def _require_two_norms(table: Table, is_new: bool) -> None:
    norms: Any = table.values.get("num_ln_in_parallel_attn")
    if (is_new and norms not in (None, 2)) or not is_new:
        raise SpecError(
            f"{table.field('num_ln_in_parallel_attn')} {norms}: blocks with one norm for attention "
            "and feed-forward together (Falcon 7B and 11B) are not planned, and those with two "
            "are: give its shape from --layers to --vocab"
        )


def _falcon_kv_heads(table: Table, heads: int, is_new: bool) -> int:
    if is_new:
        return optional_integer(table, "num_kv_heads", heads)
    return 1 if optional_flag(table, "multi_query", True) else heads
