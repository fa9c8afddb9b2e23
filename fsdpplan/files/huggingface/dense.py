"""Hugging Face configs of newer decoders without experts.

Defaults of absent keys are those of the configuration classes of transformers 5.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.files.huggingface.experts import latent_attention
from fsdpplan.files.huggingface.fields import (
    activation,
    head_dim,
    note_partial,
    note_ungated,
    optional_flag,
    optional_integer,
    optional_number,
    require_flag,
    rope_scaling,
    windows,
    with_default,
)
from fsdpplan.files.huggingface.gpt import PARALLEL_BLOCKS
from fsdpplan.files.huggingface.llama import (
    Fields,
    all_windowed,
    attention_bias,
    decoder,
    gemma2,
    olmo2,
    qwen2,
    qwen3,
)
from fsdpplan.files.table import Table

BIASES = ("attention_bias", "attention_output_bias", "mlp_bias")


def smollm3(table: Table, notes: list[str]) -> Fields:
    """SmolLM 3: each fourth block has no positions."""
    require_flag(table, "use_sliding_window", False, "it is planned without windows")
    if optional_integer(table, "no_rope_layer_interval", 4) or table.values.get("no_rope_layers"):
        notes.append("blocks without positions are planned and trained with rotary ones")
    tied = replace(table, values={"tie_word_embeddings": True, **table.values})
    return (
        decoder(tied, notes, kv_heads=4, max_positions=32768)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "mlp_bias": optional_flag(table, "mlp_bias", False)}
    )


def ministral3(table: Table, notes: list[str]) -> Fields:
    """Ministral 3's text model."""
    fields = decoder(table, notes, kv_heads=8, max_positions=262144, epsilon=1e-5)
    return fields | {
        "head_dim": optional_integer(table, "head_dim", 128),
        "rope_scaling": rope_scaling(table),
    }


def seed_oss(table: Table, notes: list[str]) -> Fields:
    """Seed-OSS: biases on queries, keys and values."""
    return decoder(table, notes, kv_heads=8, max_positions=524288) | {
        "head_dim": optional_integer(table, "head_dim", 128),
        "attention_bias": optional_flag(table, "attention_bias", True),
        "attention_output_bias": optional_flag(table, "attention_out_bias", False),
        "mlp_bias": optional_flag(table, "mlp_bias", False),
    }


def qwen3_vl(table: Table, notes: list[str]) -> Fields:
    """Qwen 3 VL's text model, which is a Qwen 3."""
    return qwen3(table, notes)


def qwen2_text(table: Table, notes: list[str]) -> Fields:
    """Qwen 2 and 2.5 VL's text model, which is a Qwen 2."""
    return qwen2(with_default(table, num_key_value_heads=8), notes)


def ernie4_5(table: Table, notes: list[str]) -> Fields:
    """ERNIE 4.5 without experts."""
    table = with_default(table, tie_word_embeddings=True)
    bias = optional_flag(table, "use_bias", False)
    return (
        decoder(table, notes, kv_heads=2, max_positions=131072, epsilon=1e-5, theta=500000.0)
        | {"head_dim": optional_integer(table, "head_dim", 128)}
        | dict.fromkeys(BIASES, bias)
    )


def granite(table: Table, notes: list[str]) -> Fields:
    """Granite 3: multipliers on embedding, branches, scores and logits, which cost nothing."""
    return (
        decoder(table, notes, kv_heads=None, max_positions=2048)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "mlp_bias": optional_flag(table, "mlp_bias", False)}
    )


def glm(table: Table, notes: list[str]) -> Fields:
    """GLM 4 of 2024: half of each head turns, biases on queries, keys and values."""
    rotated = optional_number(table, "partial_rotary_factor", 0.5)
    if rotated != 1.0 and table.values.get("partial_rotary_factor") is None:
        note_partial(notes, f"partial_rotary_factor {rotated:g}")
    return decoder(
        table, notes, kv_heads=2, max_positions=131072, epsilon=1.5625e-07, partial=True
    ) | {
        "head_dim": optional_integer(table, "head_dim", 128),
        "attention_bias": optional_flag(table, "attention_bias", True),
    }


def glm4(table: Table, notes: list[str]) -> Fields:
    """GLM 4 of 2025: norms behind attention and feed-forward, too."""
    return glm(table, notes) | {"post_norms": True}


def helium(table: Table, notes: list[str]) -> Fields:
    """Helium."""
    fields = decoder(table, notes, kv_heads=None, max_positions=4096, epsilon=1e-8, theta=100000.0)
    return (
        fields
        | attention_bias(table)
        | {
            "head_dim": optional_integer(table, "head_dim", 128),
            "mlp_bias": optional_flag(table, "mlp_bias", False),
        }
    )


def internlm3(table: Table, notes: list[str]) -> Fields:
    """InternLM 3, with transformers' names of its biases or its publisher's."""
    bias = optional_flag(table, "bias", False)
    table = with_default(table, attention_bias=bias, mlp_bias=bias)
    return granite(table, notes) | {
        "attention_bias": optional_flag(
            table, "qkv_bias", optional_flag(table, "attention_bias", bias)
        )
    }


def hunyuan_v1_dense(table: Table, notes: list[str]) -> Fields:
    """Hunyuan: norms on queries and keys behind the rotation."""
    return (
        decoder(table, notes, kv_heads=None, max_positions=2048, epsilon=1e-5)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "qk_norm": optional_flag(table, "use_qk_norm", True)}
    )


def _ungated(table: Table, notes: list[str], default: str) -> Table:
    """The table for `decoder`, which knows gates alone; the activation without one is noted."""
    note_ungated(table, notes, "hidden_act", default)
    return replace(table, values={k: v for k, v in table.values.items() if k != "hidden_act"})


def arcee(table: Table, notes: list[str]) -> Fields:
    """Arcee's foundation models: a feed-forward network of two matrices, with RMSNorm."""
    fields = decoder(_ungated(table, notes, "relu2"), notes, kv_heads=None, max_positions=4096)
    return (
        fields
        | attention_bias(table)
        | {
            "mlp": "gelu",
            "head_dim": head_dim(table),
            "mlp_bias": optional_flag(table, "mlp_bias", False),
        }
    )


def jais2(table: Table, notes: list[str]) -> Fields:
    """Jais 2: LayerNorm, biases everywhere, a feed-forward network of two matrices."""
    table = with_default(table, attention_bias=True, mlp_bias=True)
    return arcee(table, notes) | {
        "norm": "layernorm",
        "norm_epsilon": optional_number(table, "layer_norm_eps", 1e-5),
    }


def apertus(table: Table, notes: list[str]) -> Fields:
    """Apertus: two matrices with an activation of two learned numbers (xIELU) between, and norms
    on queries and keys."""
    activation(table, "hidden_act", ("xielu",))
    notes.append("hidden_act xielu is planned and trained as the tanh form of GELU")
    plain = replace(table, values={k: v for k, v in table.values.items() if k != "hidden_act"})
    fields = decoder(plain, notes, kv_heads=None, max_positions=65536, epsilon=1e-5, theta=12e6)
    return (
        fields
        | attention_bias(table)
        | {"mlp": "gelu", "head_dim": head_dim(table), "qk_norm": True}
    )


def exaone4(table: Table, notes: list[str]) -> Fields:
    """EXAONE 4: norms behind attention and feed-forward, and windows in three of four blocks of
    the larger."""
    return (
        olmo2(with_default(table, rms_norm_eps=1e-5), notes)
        | {"qk_norm_width": "head"}
        | fourth_is_full(table, notes, default=4096)
    )


def fourth_is_full(table: Table, notes: list[str], *, default: int) -> Fields:
    """Windows in three of four blocks, or as `layer_types` says."""
    window = default
    if "sliding_window" in table.values:
        window = optional_integer(table, "sliding_window", 0)
    layers = table.integer("num_hidden_layers")
    return windows(table, notes, window=window, layers=layers, full_every=4)


def cohere(table: Table, notes: list[str]) -> Fields:
    """Command R and R+."""
    notes.append(PARALLEL_BLOCKS)
    notes.append(
        "the norm that attention and feed-forward share is counted as one before each: hidden_size "
        "parameters a block more"
    )
    table = with_default(table, tie_word_embeddings=True)
    return (
        decoder(table, notes, kv_heads=None, max_positions=8192)
        | attention_bias(table)
        | {
            "head_dim": head_dim(table),
            "norm": "layernorm",
            "norm_bias": False,
            "norm_epsilon": optional_number(table, "layer_norm_eps", 1e-5),
            "qk_norm": optional_flag(table, "use_qk_norm", False),
            "qk_norm_width": "all_heads",
        }
    )


def cohere2(table: Table, notes: list[str]) -> Fields:
    """Command A and R7B: windows in three of four blocks."""
    return cohere(table, notes) | fourth_is_full(table, notes, default=4096)


def cwm(table: Table, notes: list[str]) -> Fields:
    """Code World Model: the first of four blocks sees everything."""
    fields = decoder(table, notes, kv_heads=8, max_positions=131072, epsilon=1e-5, theta=1e6)
    return (
        fields
        | {"head_dim": optional_integer(table, "head_dim", 128)}
        | fourth_is_full(table, notes, default=8192)
    )


def ministral(table: Table, notes: list[str]) -> Fields:
    """Ministral of 2024: windows as `layer_types` says, or in all blocks."""
    fields = decoder(table, notes, kv_heads=8, max_positions=131072)
    return fields | {"head_dim": head_dim(table)} | all_windowed(table, notes, default=4096)


def vaultgemma(table: Table, notes: list[str]) -> Fields:
    """VaultGemma: Gemma 2 without norms behind."""
    return gemma2(table, notes) | {"post_norms": False}


def stablelm(table: Table, notes: list[str]) -> Fields:
    """StableLM 2 and 3B: LayerNorm with SwiGLU."""
    if optional_flag(table, "use_parallel_residual", False):
        notes.append(PARALLEL_BLOCKS)
    require_flag(table, "qk_layernorm", False, "queries and keys are planned without such norms")
    rotated = optional_number(table, "partial_rotary_factor", 0.25)
    if table.values.get("partial_rotary_factor") is None and rotated != 1.0:
        note_partial(notes, f"partial_rotary_factor {rotated:g}")
    return decoder(table, notes, kv_heads=32, max_positions=4096, partial=True) | {
        "head_dim": head_dim(table),
        "norm": "layernorm",
        "norm_epsilon": optional_number(table, "layer_norm_eps", 1e-5),
        "attention_bias": optional_flag(table, "use_qkv_bias", False),
    }


def youtu(table: Table, notes: list[str]) -> Fields:
    """Youtu-LLM: latent attention without experts."""
    return latent_attention(with_default(table, tie_word_embeddings=True), notes)
