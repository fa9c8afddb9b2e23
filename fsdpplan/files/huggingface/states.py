"""Hugging Face configs of newer decoders some of whose blocks have a state in attention's place.

Defaults of absent keys are those of the configuration classes of transformers 5; widths of experts
and of states must be written.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.files.huggingface.experts import auxiliary_loss, deepseek_v3, experts_of
from fsdpplan.files.huggingface.fields import (
    head_dim,
    layers_of,
    letters,
    optional_flag,
    optional_integer,
    period,
    renamed,
    whole_pattern,
    with_default,
    within_layers,
)
from fsdpplan.files.huggingface.hybrids import LINEAR_OR_FULL
from fsdpplan.files.huggingface.llama import Fields, attention_bias, decoder, olmo2
from fsdpplan.files.table import Table
from fsdpplan.spec.model import DeltaRule, Experts, Mamba2, Router


def _mamba(table: Table) -> Mamba2:
    """Mamba-2 by the keys that Granite 4 and Bamba share."""
    heads = optional_integer(table, "mamba_n_heads", 128)
    inner = optional_integer(table, "mamba_expand", 2) * table.integer("hidden_size")
    width = table.values.get("mamba_d_head", "auto")
    return Mamba2(
        heads=heads,
        head_dim=inner // heads if width == "auto" else optional_integer(table, "mamba_d_head", 64),
        groups=optional_integer(table, "mamba_n_groups", 1),
        state=optional_integer(table, "mamba_d_state", 256),
        convolution=optional_integer(table, "mamba_d_conv", 4),
        convolution_bias=optional_flag(table, "mamba_conv_bias", True),
        bias=optional_flag(table, "mamba_proj_bias", False),
        chunk=optional_integer(table, "mamba_chunk_size", 256),
    )


def _mixed(table: Table, mixers: str, notes: list[str]) -> Fields:
    """The letters of mixers, and the state space where some block has one."""
    if "A" in mixers and table.values.get("position_embedding_type", "rope") != "rope":
        notes.append("attention is planned with rotary positions, of which this model has none")
    mixers = period(mixers)
    if mixers == "A":
        return {}
    return {"mixers": mixers, "mamba": _mamba(table)}


GRANITE_KINDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "A",
    "full_attention": "A",
}


def granitemoehybrid(table: Table, notes: list[str]) -> Fields:
    """Granite 4: Mamba-2 in most blocks, attention in others; in each experts and a network that
    every token visits, or that alone."""
    table = renamed(table, {"layers_block_type": "layer_types"})
    layers = layers_of(table)
    kinds = "M" * layers
    if table.values.get("layer_types") is not None:
        kinds = whole_pattern(letters(table, "layer_types", layers, GRANITE_KINDS), layers)
    shared = optional_integer(table, "shared_intermediate_size", 1024)
    fields = (
        decoder(table, notes, kv_heads=None, max_positions=2048)
        | attention_bias(table)
        | {"head_dim": head_dim(table)}
        | _mixed(table, kinds, notes)
    )
    if not optional_integer(table, "num_local_experts", 8, lowest=0):
        return fields | {"ffn_hidden": shared}
    experts = Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=table.integer("intermediate_size"),
        shared_hidden=shared,
        router=Router(aux_loss_coef=auxiliary_loss(table)),
    )
    return fields | {"experts": experts}


def bamba(table: Table, notes: list[str]) -> Fields:
    """Bamba: Mamba-2 in most blocks, attention in those listed."""
    layers = layers_of(table)
    found = table.values.get("attn_layer_indices") or []
    if not isinstance(found, list) or any(type(one) is not int for one in found):
        raise table.wrong("attn_layer_indices", "a list of numbers of blocks")
    kinds = "".join("A" if layer in found else "M" for layer in range(layers))
    return (
        decoder(table, notes, kv_heads=8, max_positions=262144, epsilon=1e-5, partial=True)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "mlp_bias": optional_flag(table, "mlp_bias", False)}
        | _mixed(table, kinds, notes)
    )


def olmo_hybrid(table: Table, notes: list[str]) -> Fields:
    """OLMo Hybrid: OLMo 3's blocks, the gated delta rule in three of four."""
    layers = layers_of(table)
    mixers = "DDDA"
    if table.values.get("layer_types") is not None:
        mixers = letters(table, "layer_types", layers, LINEAR_OR_FULL)
    heads = table.integer("num_attention_heads")
    fields = olmo2(with_default(table, rms_norm_eps=1e-6), notes)
    if mixers == "A":
        return fields
    delta = DeltaRule(
        key_heads=optional_integer(table, "linear_num_key_heads", heads),
        value_heads=optional_integer(table, "linear_num_value_heads", heads),
        key_head_dim=table.integer("linear_key_head_dim"),
        value_head_dim=table.integer("linear_value_head_dim"),
        convolution=optional_integer(table, "linear_conv_kernel_dim", 4),
    )
    return fields | {"mixers": mixers, "delta": delta}


KIMI_DELTA = (
    "Kimi delta attention, which forgets in each channel of a key by itself, is planned as the "
    "gated delta rule, which forgets in a head at once"
)


def _kimi_delta(table: Table, mixers: str, notes: list[str]) -> Fields:
    if table.values.get("mlp_layer_types") is None:
        table = with_default(table, first_k_dense_replace=1)
    renames = {
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
        "model_max_length": "max_position_embeddings",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    table = renamed(table, renames)
    if "q_lora_rank" not in table.values:
        table = replace(table, values={**table.values, "q_lora_rank": None})
    fields = deepseek_v3(table, notes)
    if mixers == "A":
        return fields
    notes.append(KIMI_DELTA)
    heads = optional_integer(table, "linear_num_heads", table.integer("num_attention_heads"))
    width = optional_integer(table, "linear_head_dim", optional_integer(table, "head_dim", 128))
    delta = DeltaRule(
        key_heads=heads,
        value_heads=heads,
        key_head_dim=width,
        value_head_dim=width,
        convolution=optional_integer(table, "linear_conv_kernel_dim", 4),
    )
    return fields | {"mixers": mixers, "delta": delta}


def kimi_linear(table: Table, notes: list[str]) -> Fields:
    """Kimi Linear: latent attention in each fourth block, Kimi delta attention in the others."""
    layers = layers_of(table)
    usual = {"n_group": 1, "topk_group": 1}
    if isinstance(table.values.get("linear_attn_config"), dict):  # its publisher's keys
        linear = table.table("linear_attn_config")
        full = linear.values.get("full_attn_layers") or []
        if not isinstance(full, list) or any(type(one) is not int for one in full):
            raise linear.wrong("full_attn_layers", "a list of numbers of blocks, from 1 on")
        mixers = period("".join("A" if layer + 1 in full else "D" for layer in range(layers)))
        usual |= {
            "linear_num_heads": linear.integer("num_heads"),
            "linear_head_dim": linear.integer("head_dim"),
            "linear_conv_kernel_dim": optional_integer(linear, "short_conv_kernel_size", 4),
        }
    else:
        mixers = letters(table, "layer_types", layers, LINEAR_OR_FULL)
    table = renamed(table, {"num_expert_group": "n_group"})
    return _kimi_delta(with_default(table, **usual), mixers, notes)


def bailing_hybrid(table: Table, notes: list[str]) -> Fields:
    """Ling 2.5: latent attention in the last block of each group, Kimi delta attention before."""
    layers = layers_of(table)
    size = optional_integer(table, "layer_group_size", 6)
    mixers = "D" * (within_layers(table, "layer_group_size", size) - 1) + "A"
    if table.values.get("layer_types") is not None:
        mixers = letters(table, "layer_types", layers, LINEAR_OR_FULL)
    return _kimi_delta(table, mixers[:layers], notes)
