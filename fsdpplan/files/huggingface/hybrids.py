"""Hugging Face configs whose blocks are not all of one kind, and those of newer mixtures.

Defaults of absent keys are those of the configuration classes of transformers 5; numbers and
widths of experts, and of states, must be written.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.errors import SpecError
from fsdpplan.files.huggingface.experts import (
    SECOND_TOKEN,
    auxiliary_loss,
    deepseek_v3,
    dense_at_start,
    experts_of,
    grouped_sigmoid,
    require_every_block,
)
from fsdpplan.files.huggingface.fields import (
    activation,
    head_dim,
    layers_of,
    letters,
    note_partial,
    note_ungated,
    optional_flag,
    optional_integer,
    optional_number,
    period,
    require_flag,
    rope_theta,
    whole_pattern,
    with_default,
    within_layers,
)
from fsdpplan.files.huggingface.llama import Fields, attention_bias, decoder
from fsdpplan.files.table import Table, short
from fsdpplan.spec.model import DeltaRule, Experts, Indexer, LatentAttention, Mamba2, Router


def llama4(table: Table, notes: list[str]) -> Fields:
    """Llama 4's text model: a shared expert and one of many, in each block or each second one;
    three of four blocks see chunks of a sequence, the fourth all of it without positions."""
    layers = layers_of(table)
    plain = {k: v for k, v in table.values.items() if k not in ("rope_scaling", "rope_parameters")}
    fields = decoder(
        replace(table, values=plain),
        notes,
        kv_heads=8,
        max_positions=131072,
        epsilon=1e-5,
        theta=500000.0,
    )
    width = table.integer("intermediate_size")
    experts = Experts(
        experts=experts_of(table),
        active=optional_integer(table, "num_experts_per_tok", 1),
        hidden=width,
        shared_hidden=width,
        router=Router(scores="sigmoid", normalised=False),
    )
    notes.append(
        "planned and trained as usual blocks: positions in each one, no norm without weights on "
        "queries and keys, stretched positions left out, and scores on what experts return, not on "
        "what they read; none of it changes parameters, nor memory or time by more than a rotation"
    )
    return (
        fields
        | attention_bias(table)
        | {
            "ffn_hidden": table.integer("intermediate_size_mlp"),
            "head_dim": head_dim(table),
            "experts": experts,
            "networks": _llama4_networks(table, layers),
        }
        | _chunks(table, layers)
    )


def _llama4_networks(table: Table, layers: int) -> str:
    step = optional_integer(table, "interleave_moe_layer_step", 1)
    sparse = table.values.get("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, layers, step))
    known = isinstance(sparse, list) and all(
        type(layer) is int and 0 <= layer < layers for layer in sparse
    )
    if not known or not sparse:
        raise table.wrong("moe_layers", f"a list of blocks from 0 to {layers - 1}")
    found = period("".join("E" if layer in sparse else "F" for layer in range(layers)))
    return "" if found == "E" else found


def _chunks(table: Table, layers: int) -> Fields:
    size = 8192
    if "attention_chunk_size" in table.values:
        size = optional_integer(table, "attention_chunk_size", 0)
    every = optional_integer(table, "no_rope_layer_interval", 4)
    if table.values.get("layer_types") is not None:
        words = {"chunked_attention": "c", "full_attention": "f"}
        found = letters(table, "layer_types", layers, words)
        every = 1 if found == "f" else len(found)
        if found != "c" * (every - 1) + "f":
            raise table.wrong("layer_types", "chunked_attention but for each Nth layer")
    if not size or every == 1:
        return {}
    return {"sliding_window": size, "full_attention_every": every, "window_kind": "chunked"}


def glm_moe_dsa(table: Table, notes: list[str]) -> Fields:
    """GLM 5: DeepSeek-V3.2 with one group; some blocks may take the keys that others chose."""
    kinds = table.values.get("indexer_types") or table.values.get("index_topk_pattern")
    listed = kinds if isinstance(kinds, list | str) else ()
    shared = sum(str(kind).lower().startswith("s") for kind in listed)
    if shared:
        notes.append(f"{shared} blocks that choose no keys themselves are planned as if they did")
    return deepseek_v32(with_default(table, n_group=1, topk_group=1, q_lora_rank=2048), notes)


def deepseek_v32(table: Table, notes: list[str]) -> Fields:
    """DeepSeek-V3.2: V3 with an indexer that chooses the keys of each query."""
    fields = deepseek_v3(table, notes)
    latent = fields["latent"]
    indexer = Indexer(
        heads=table.integer("index_n_heads"),
        head_dim=table.integer("index_head_dim"),
        keys=table.integer("index_topk"),
    )
    assert isinstance(latent, LatentAttention)
    return fields | {"latent": replace(latent, indexer=indexer)}


LINEAR_OR_FULL = {"linear_attention": "D", "full_attention": "A"}


def _gated_delta(table: Table, notes: list[str]) -> Fields:
    """Linear attention by the gated delta rule, and each Nth block attention with a gate."""
    layers = layers_of(table)
    key = "full_attention_interval"
    every = within_layers(table, key, optional_integer(table, key, 4))
    mixers = "D" * (every - 1) + "A"
    if table.values.get("layer_types") is not None:
        mixers = letters(table, "layer_types", layers, LINEAR_OR_FULL)
    delta = DeltaRule(
        key_heads=table.integer("linear_num_key_heads"),
        value_heads=table.integer("linear_num_value_heads"),
        key_head_dim=table.integer("linear_key_head_dim"),
        value_head_dim=table.integer("linear_value_head_dim"),
        convolution=optional_integer(table, "linear_conv_kernel_dim", 4),
    )
    if optional_integer(table, "mtp_num_hidden_layers", 0, lowest=0):
        notes.append(SECOND_TOKEN)
    quiet: list[str] = []
    rope_theta(table, quiet, may_be_partial=True)
    if not quiet:
        note_partial(notes, "partial_rotary_factor 0.25")
    return attention_bias(table) | {
        "head_dim": optional_integer(table, "head_dim", 256),
        "qk_norm": True,
        "attention_gate": optional_flag(table, "attn_output_gate", True),
        "mixers": "" if mixers == "A" else mixers,
        "delta": None if mixers == "A" else delta,
    }


def _qwen_experts(table: Table, *, normalised: bool) -> Experts:
    return Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=table.integer("moe_intermediate_size"),
        shared_hidden=table.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=dense_at_start(table, "mlp_only_layers"),
        router=Router(normalised=normalised, aux_loss_coef=auxiliary_loss(table)),
    )


def qwen3_next(table: Table, notes: list[str]) -> Fields:
    """Qwen 3 Next: three of four blocks have linear attention; many narrow experts."""
    require_every_block(table, "decoder_sparse_step")
    experts = _qwen_experts(table, normalised=optional_flag(table, "norm_topk_prob", True))
    return (
        decoder(table, notes, kv_heads=2, max_positions=32768, partial=True)
        | _gated_delta(table, notes)
        | {"experts": experts}
    )


def qwen3_5(table: Table, notes: list[str]) -> Fields:
    """Qwen 3.5's text model, dense."""
    shape = decoder(table, notes, kv_heads=4, max_positions=32768, partial=True)
    return shape | _gated_delta(table, notes)


def qwen3_5_moe(table: Table, notes: list[str]) -> Fields:
    """Qwen 3.5's text model with experts."""
    values = dict(table.values)
    experts = _qwen_experts(table, normalised=True)
    values.setdefault("intermediate_size", experts.hidden)  # no block has a dense network
    table = replace(table, values=values)
    return (
        decoder(table, notes, kv_heads=2, max_positions=32768, partial=True)
        | _gated_delta(table, notes)
        | {"experts": experts}
    )


NEMOTRON_LETTERS = {"M": ("M", "-"), "*": ("A", "-"), "-": ("-", "F"), "E": ("-", "E")}
NEMOTRON_KINDS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}


def nemotron_h(table: Table, notes: list[str]) -> Fields:
    """Nemotron-H and Nemotron 3: each block is a Mamba-2, an attention, a network or experts."""
    table = _plain_nemotron(table)
    pattern = _nemotron_pattern(table)
    if table.values.get("moe_latent_size") is not None:
        raise table.wrong("moe_latent_size", "null: experts in a latent space are not planned")
    note_ungated(table, notes, "mlp_hidden_act", "relu2")
    if optional_integer(table, "num_nextn_predict_layers", 0, lowest=0):
        notes.append(SECOND_TOKEN)
    notes.append("attention is planned with rotary positions, of which transformers has none here")
    kinds = [NEMOTRON_LETTERS[letter] for letter in pattern]
    bias = optional_flag(table, "attention_bias", False)
    heads = table.integer("num_attention_heads")
    return {
        "layers": len(pattern),
        "hidden": table.integer("hidden_size"),
        "ffn_hidden": table.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": optional_integer(table, "num_key_value_heads", heads),
        "head_dim": optional_integer(table, "head_dim", 128),
        "vocab": table.integer("vocab_size"),
        "max_positions": optional_integer(table, "max_position_embeddings", 4096),
        "mlp": "gelu",
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": optional_flag(table, "mlp_bias", False),
        "tied_embeddings": optional_flag(table, "tie_word_embeddings", False),
        "norm_epsilon": optional_number(table, "layer_norm_epsilon", 1e-5),
        "mixers": period("".join(mixer for mixer, _ in kinds)),
        "networks": period("".join(network for _, network in kinds)),
        "mamba": _nemotron_mamba(table) if "M" in pattern else None,
        "experts": _nemotron_experts(table) if "E" in pattern else None,
    }


def _plain_nemotron(table: Table) -> Table:
    """Keys of older configs by their names of now. Source: transformers 5, `NemotronHConfig`."""
    older = {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_chunk_size": "chunk_size",
        "mamba_conv_bias": "use_conv_bias",
    }
    values = dict(table.values)
    for old, new in older.items():
        if old in values:
            values.setdefault(new, values[old])
    return replace(table, values=values)


def _nemotron_pattern(table: Table) -> str:
    for key in ("layers_block_type", "layer_types"):
        kinds = table.values.get(key)
        if kinds is not None:
            layers = len(kinds) if isinstance(kinds, list) else 0
            return whole_pattern(letters(table, key, layers, NEMOTRON_KINDS), layers)
    pattern = table.text("hybrid_override_pattern")
    strange = sorted(set(pattern) - set(NEMOTRON_LETTERS))
    if strange or not pattern:
        raise SpecError(
            f"{table.field('hybrid_override_pattern')} has {short(''.join(strange))}: the kinds of "
            "blocks that are planned are M (Mamba-2), * (attention), - (network) and E (experts); "
            "give the size of another model by --params"
        )
    return pattern


def _nemotron_mamba(table: Table) -> Mamba2:
    activation(table, "mamba_hidden_act", ("silu", "swish"))
    return Mamba2(
        heads=table.integer("mamba_num_heads"),
        head_dim=table.integer("mamba_head_dim"),
        groups=optional_integer(table, "n_groups", 8),
        state=optional_integer(table, "ssm_state_size", 128),
        convolution=optional_integer(table, "conv_kernel", 4),
        convolution_bias=optional_flag(table, "use_conv_bias", True),
        bias=optional_flag(table, "use_bias", False),
        chunk=optional_integer(table, "chunk_size", 128),
    )


def _nemotron_experts(table: Table) -> Experts:
    require_flag(table, "mlp_bias", False, "experts are planned without biases")
    return Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=table.integer("moe_intermediate_size"),
        shared_hidden=table.integer("moe_shared_expert_intermediate_size"),
        router=grouped_sigmoid(table, scaling=1.0, groups=1, chosen=1),
    )
