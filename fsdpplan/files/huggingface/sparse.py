"""Hugging Face configs of newer mixtures of experts with attention in each block.

Defaults of absent keys are those of the configuration classes of transformers 5; numbers and
widths of experts must be written.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.files.huggingface.dense import cohere2, exaone4, fourth_is_full, hunyuan_v1_dense
from fsdpplan.files.huggingface.experts import (
    SECOND_TOKEN,
    auxiliary_loss,
    deepseek_v3,
    experts_of,
    grouped_sigmoid,
    with_places,
)
from fsdpplan.files.huggingface.fields import (
    head_dim,
    layers_of,
    note_partial,
    optional_flag,
    optional_integer,
    optional_number,
    renamed,
    require_flag,
    with_default,
)
from fsdpplan.files.huggingface.llama import Fields, attention_bias, decoder, olmo2, qwen_windows
from fsdpplan.files.table import Table
from fsdpplan.spec.model import Experts, Router


def glm4_moe(table: Table, notes: list[str]) -> Fields:
    """GLM 4.5 and 4.6: a mixture as DeepSeek-V3's behind grouped-query attention."""
    _second_token(table, notes)
    rotated = optional_number(table, "partial_rotary_factor", 0.5)
    if rotated != 1.0 and "partial_rotary_factor" not in table.values:
        note_partial(notes, f"partial_rotary_factor {rotated:g}")
    width = table.integer("moe_intermediate_size")
    experts = Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=width,
        shared_hidden=width * optional_integer(table, "n_shared_experts", 1, lowest=0),
        dense_layers=optional_integer(table, "first_k_dense_replace", 1, lowest=0),
        router=grouped_sigmoid(table, scaling=1.0, groups=1, chosen=1),
    )
    return decoder(table, notes, kv_heads=8, max_positions=131072, epsilon=1e-5, partial=True) | {
        "head_dim": head_dim(table),
        "attention_bias": optional_flag(table, "attention_bias", False),
        "qk_norm": optional_flag(table, "use_qk_norm", False),
        "experts": experts,
    }


def minimax_m2(table: Table, notes: list[str]) -> Fields:
    """MiniMax M2: experts in each block, norms over all heads' queries and keys."""
    if optional_flag(table, "use_mtp", False):
        notes.append(SECOND_TOKEN)
    rotated = optional_integer(table, "rotary_dim", head_dim(table))
    if rotated != head_dim(table):
        note_partial(notes, f"rotary_dim {rotated} of {head_dim(table)}")
    experts = Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=table.integer("intermediate_size"),
        router=Router(scores="sigmoid"),
    )
    return decoder(table, notes, kv_heads=8, max_positions=196608, partial=True) | {
        "head_dim": head_dim(table),
        "qk_norm": True,
        "qk_norm_width": "all_heads",
        "experts": experts,
    }


def _second_token(table: Table, notes: list[str]) -> None:
    for key in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        if optional_integer(table, key, 0, lowest=0):
            notes.append(SECOND_TOKEN)
            return


def _experts(
    table: Table,
    router: Router,
    *,
    active: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
    shared: str = "",
) -> Experts:
    """Experts by the family's keys; `shared` counts those of every token, as wide as the others."""
    hidden = table.integer(width)
    number = optional_integer(table, shared, 0, lowest=0) if shared else 0
    return Experts(
        experts=experts_of(table),
        active=table.integer(active),
        hidden=hidden,
        shared_hidden=number * hidden,
        router=router,
    )


def glm4_moe_text(table: Table, notes: list[str]) -> Fields:
    """GLM 4.5 V's and 4.6 V's text model."""
    return glm4_moe(with_default(table, attention_bias=True), notes)


def glm4_moe_lite(table: Table, notes: list[str]) -> Fields:
    """GLM 4.7 Flash: DeepSeek-V3 with one group and one block without experts."""
    usual = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "n_group": 1}
    return deepseek_v3(with_default(table, **usual, topk_group=1, q_lora_rank=768), notes)


def axk1(table: Table, notes: list[str]) -> Fields:
    """A.X K1: DeepSeek-V3 with a norm behind the experts, which is left out."""
    notes.append("the norm behind each block's experts is left out")
    return deepseek_v3(with_default(table, first_k_dense_replace=1), notes)


def mistral4(table: Table, notes: list[str]) -> Fields:
    """Mistral 4: latent attention, and a softmax over all experts."""
    values = dict(table.values)
    for key in ("rope_parameters", "rope_scaling"):  # says how wide the rotated part is once more
        if isinstance(rope := values.get(key), dict):
            values[key] = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
    usual = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "q_lora_rank": 1024}
    table = with_default(replace(table, values=values), **usual)
    fields = deepseek_v3(table, notes)
    experts: Experts = fields["experts"]
    return fields | {"experts": replace(experts, router=replace(experts.router, scores="softmax"))}


def ernie4_5_moe(table: Table, notes: list[str]) -> Fields:
    """ERNIE 4.5 with experts: two of every token, none in the first block."""
    table = renamed(table, {"num_experts_per_tok": "moe_k", "num_experts": "moe_num_experts"})
    table = with_default(table, tie_word_embeddings=True, moe_num_shared_experts=2)
    _second_token(table, notes)
    layers = table.integer("num_hidden_layers")
    last = optional_integer(table, "moe_layer_end_index", -1, lowest=-1)
    if last not in (-1, layers - 1):
        raise table.wrong(
            "moe_layer_end_index", f"-1 or {layers - 1}: experts up to the last block"
        )
    if optional_integer(table, "moe_layer_interval", 1) != 1:
        raise table.wrong("moe_layer_interval", "1: experts in each block from the first on")
    router = Router(aux_loss_coef=auxiliary_loss(table))
    experts = _experts(table, router, active="moe_k", shared="moe_num_shared_experts")
    first = optional_integer(table, "moe_layer_start_index", 1, lowest=0)
    bias = optional_flag(table, "use_bias", False)
    return decoder(table, notes, kv_heads=4, max_positions=131072, epsilon=1e-5, theta=500000.0) | {
        "head_dim": head_dim(table),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "experts": replace(experts, dense_layers=first),
    }


def dots1(table: Table, notes: list[str]) -> Fields:
    """dots.llm1: norms on queries and keys, experts as DeepSeek-V3's."""
    usual = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
    table = with_default(table, **usual)
    router = grouped_sigmoid(table, scaling=1.0, groups=1, chosen=1)
    experts = _experts(table, router, shared="n_shared_experts")
    return (
        decoder(table, notes, kv_heads=32, max_positions=2048)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "qk_norm": True}
        | with_places(table, experts, dense_layers=0)
        | qwen_windows(table, notes)
    )


def hunyuan_v1_moe(table: Table, notes: list[str]) -> Fields:
    """Hunyuan A13B: experts in each block, one of them of every token, all as wide."""
    values = dict(table.values)
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        found = values.get(key)
        if isinstance(found, list) and found and all(one == found[0] for one in found):
            values[key] = found[0]  # a number for each block
    table = replace(table, values=values)
    table = with_default(table, moe_intermediate_size=table.integer("intermediate_size"))
    table = with_default(table, num_shared_expert=1)
    experts = _experts(table, Router(), active="moe_topk", shared="num_shared_expert")
    return hunyuan_v1_dense(table, notes) | {"experts": experts}


def hy_v3(table: Table, notes: list[str]) -> Fields:
    """Hunyuan 3: one block without experts at the start, one expert of every token."""
    table = renamed(table, {"router_scaling_factor": "routed_scaling_factor"})
    table = with_default(table, num_shared_experts=1)
    _second_token(table, notes)
    router = grouped_sigmoid(table, scaling=2.826, groups=1, chosen=1)
    experts = _experts(table, router, shared="num_shared_experts")
    return (
        decoder(table, notes, kv_heads=8, max_positions=131072, epsilon=1e-5, theta=11158840.0)
        | attention_bias(table)
        | {"head_dim": optional_integer(table, "head_dim", 128), "qk_norm": True}
        | with_places(table, experts, dense_layers=1)
    )


def exaone_moe(table: Table, notes: list[str]) -> Fields:
    """K-EXAONE: windows in three of four blocks, experts but in the first."""
    table = with_default(table, num_shared_experts=1)
    _second_token(table, notes)
    router = grouped_sigmoid(table, scaling=2.5, groups=1, chosen=1)
    experts = _experts(table, router, shared="num_shared_experts")
    return exaone4(table, notes) | with_places(table, experts, dense_layers=1)


def solar_open(table: Table, notes: list[str]) -> Fields:
    """Solar Open: GLM 4.5's blocks, all with experts."""
    table = with_default(table, partial_rotary_factor=1.0, first_k_dense_replace=0)
    table = with_default(table, intermediate_size=table.integer("moe_intermediate_size"))
    return glm4_moe(table, notes) | {"head_dim": optional_integer(table, "head_dim", 128)}


def mellum(table: Table, notes: list[str]) -> Fields:
    """Mellum 2: Qwen 3 with experts, and windows as `layer_types` says."""
    _second_token(table, notes)
    table = with_default(table, norm_topk_prob=True)
    experts = _experts(table, Router(aux_loss_coef=auxiliary_loss(table)))
    return (
        decoder(table, notes, kv_heads=4, max_positions=131072)
        | attention_bias(table)
        | {"head_dim": optional_integer(table, "head_dim", 128), "qk_norm": True}
        | with_places(table, experts, dense_layers=0)
        | fourth_is_full(table, notes, default=1024)
    )


HEAD_GATES = "the gate of one number a head behind attention is left out"


def laguna(table: Table, notes: list[str]) -> Fields:
    """Laguna: an expert of every token, and a gate a head behind attention."""
    heads = table.values.get("num_attention_heads_per_layer")
    if isinstance(heads, list) and set(map(str, heads)) != {
        str(table.integer("num_attention_heads"))
    }:
        raise table.wrong("num_attention_heads_per_layer", "as many in each block")
    notes.append(HEAD_GATES)
    router = Router(
        scores="sigmoid", scaling=optional_number(table, "moe_routed_scaling_factor", 1.0)
    )
    experts = replace(
        _experts(table, router),
        shared_hidden=table.integer("shared_expert_intermediate_size"),
    )
    return (
        decoder(table, notes, kv_heads=8, max_positions=131072, partial=True)
        | attention_bias(table)
        | {"head_dim": optional_integer(table, "head_dim", 128), "qk_norm": True}
        | with_places(table, experts, dense_layers=1)
        | fourth_is_full(table, notes, default=512)
    )


def step3p5(table: Table, notes: list[str]) -> Fields:
    """Step 3.5's text model: an expert of every token, and a gate a head behind attention."""
    heads = table.integer("num_attention_heads")
    if optional_integer(table, "num_sliding_attention_heads", heads) != heads:
        raise table.wrong("num_sliding_attention_heads", f"{heads}, as in blocks without windows")
    notes.append(HEAD_GATES)
    _second_token(table, notes)
    router = Router(
        scores="sigmoid", scaling=optional_number(table, "moe_router_scaling_factor", 1.0)
    )
    shared = optional_integer(table, "share_expert_dim", 0, lowest=0)
    experts = replace(_experts(table, router), shared_hidden=shared)
    return (
        decoder(table, notes, kv_heads=8, max_positions=128000, epsilon=1e-5)
        | attention_bias(table)
        | {"head_dim": optional_integer(table, "head_dim", 128), "qk_norm": True}
        | with_places(table, experts, dense_layers=3)
        | fourth_is_full(table, notes, default=0)
    )


def afmoe(table: Table, notes: list[str]) -> Fields:
    """Trinity: a gate behind attention, norms before and behind, windows in most blocks."""
    table = renamed(table, {"num_dense_layers": "first_k_dense_replace"})
    router = Router(scores="sigmoid", scaling=optional_number(table, "route_scale", 1.0))
    experts = _experts(table, router, shared="num_shared_experts")
    return (
        decoder(table, notes, kv_heads=None, max_positions=16384, epsilon=1e-5)
        | attention_bias(table)
        | {
            "head_dim": optional_integer(table, "head_dim", 128),
            "qk_norm": True,
            "attention_gate": True,
            "post_norms": True,
        }
        | with_places(table, experts, dense_layers=1)
        | fourth_is_full(table, notes, default=1024)
    )


def cohere2_moe(table: Table, notes: list[str]) -> Fields:
    """Command A with experts, as wide as a dense network."""
    sigmoid = table.values.get("expert_selection_fn") == "sigmoid"
    router = Router(
        scores="sigmoid" if sigmoid else "softmax",
        normalised=optional_flag(table, "norm_topk_prob", True),
    )
    experts = _experts(table, router, width="intermediate_size", shared="num_shared_experts")
    return cohere2(table, notes) | with_places(table, experts, dense_layers=0)


def olmoe(table: Table, notes: list[str]) -> Fields:
    """OLMoE: norms over all heads' queries and keys."""
    router = Router(
        normalised=optional_flag(table, "norm_topk_prob", False),
        aux_loss_coef=auxiliary_loss(table),
    )
    return (
        decoder(table, notes, kv_heads=None, max_positions=4096, epsilon=1e-5)
        | attention_bias(table)
        | {
            "head_dim": head_dim(table),
            "qk_norm": True,
            "qk_norm_width": "all_heads",
            "experts": _experts(table, router, width="intermediate_size"),
        }
    )


def flex_olmo(table: Table, notes: list[str]) -> Fields:
    """FlexOlmo: OLMo 2's blocks with experts as wide as its network."""
    router = Router(
        normalised=optional_flag(table, "norm_topk_prob", False),
        aux_loss_coef=auxiliary_loss(table),
    )
    return olmo2(table, notes) | {"experts": _experts(table, router, width="intermediate_size")}


def phimoe(table: Table, notes: list[str]) -> Fields:
    """Phi 3.5 MoE: LayerNorm with SwiGLU."""
    require_flag(table, "lm_head_bias", False, "the output head is planned without a bias")
    router = Router(aux_loss_coef=auxiliary_loss(table))
    return (
        decoder(table, notes, kv_heads=8, max_positions=131072, theta=1e6)
        | attention_bias(table)
        | {
            "head_dim": head_dim(table),
            "norm": "layernorm",
            "norm_epsilon": optional_number(table, "rms_norm_eps", 1e-5),
            "experts": _experts(table, router, width="intermediate_size"),
        }
    )


def granitemoe(table: Table, notes: list[str]) -> Fields:
    """Granite 3 with experts, and with one of every token (`granitemoeshared`)."""
    experts = replace(
        _experts(table, Router(aux_loss_coef=auxiliary_loss(table)), width="intermediate_size"),
        shared_hidden=optional_integer(table, "shared_intermediate_size", 0, lowest=0),
    )
    return (
        decoder(table, notes, kv_heads=None, max_positions=2048)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "experts": experts}
    )


def minimax_m3(table: Table, notes: list[str]) -> Fields:
    """MiniMax M3's text model: M2 with an expert of every token."""
    if optional_integer(table, "index_topk_blocks", 0, lowest=0):
        notes.append("blocks whose keys are chosen are planned as attention over all keys")
    rotated = optional_integer(table, "rotary_dim", head_dim(table))
    if rotated != head_dim(table):
        note_partial(notes, f"rotary_dim {rotated} of {head_dim(table)}")
    router = Router(scores="sigmoid", scaling=optional_number(table, "routed_scaling_factor", 2.0))
    experts = replace(
        _experts(table, router, width="intermediate_size"),
        shared_hidden=optional_integer(table, "shared_intermediate_size", 0, lowest=0),
    )
    dense = optional_integer(table, "dense_intermediate_size", table.integer("intermediate_size"))
    return (
        decoder(table, notes, kv_heads=4, max_positions=524288, theta=5e6, partial=True)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "qk_norm": True, "ffn_hidden": dense}
        | with_places(table, experts, dense_layers=0)
    )


def bailing_moe(table: Table, notes: list[str]) -> Fields:
    """Ling and Ring 1 and 2: their publisher's own keys."""
    _second_token(table, notes)
    if table.values.get("score_function", "softmax") == "sigmoid":
        router = grouped_sigmoid(table, scaling=1.0, groups=1, chosen=1)
    else:
        router = Router(
            normalised=optional_flag(table, "norm_topk_prob", True),
            aux_loss_coef=auxiliary_loss(table),
        )
    experts = _experts(table, router, shared="num_shared_experts")
    return (
        decoder(table, notes, kv_heads=None, max_positions=16384, partial=True)
        | {
            "head_dim": head_dim(table),
            "attention_bias": optional_flag(table, "use_qkv_bias", False),
            "attention_output_bias": optional_flag(table, "use_bias", False),
            "qk_norm": optional_flag(table, "use_qk_norm", False),
        }
        | with_places(table, experts, dense_layers=0)
    )


def mimo_v2_flash(table: Table, notes: list[str]) -> Fields:
    """MiMo V2 Flash: narrower values than keys, and more key heads in blocks with windows."""
    keys = {
        "swa_num_key_value_heads": "num_key_value_heads",
        "layernorm_epsilon": "rms_norm_eps",
        "sliding_window_size": "sliding_window",
    }
    layers = layers_of(table)
    values = dict(table.values)
    pattern, sparse = values.get("hybrid_layer_pattern"), values.get("moe_layer_freq")
    if isinstance(pattern, list):
        words = ["sliding_attention" if one else "full_attention" for one in pattern]
        values.setdefault("layer_types", words)
    if isinstance(sparse, list):
        values.setdefault("mlp_layer_types", ["sparse" if one else "dense" for one in sparse])
    table = with_default(renamed(replace(table, values=values), keys), sliding_window=128)
    _second_token(table, notes)
    wide = optional_integer(table, "head_dim", 192)
    narrow = optional_integer(table, "v_head_dim", 128)
    in_windows = optional_integer(
        table, "swa_num_key_value_heads", 2 * optional_integer(table, "num_key_value_heads", 4)
    )
    notes.append(
        f"values of {narrow} are planned as wide as keys, {wide}, and each block with the "
        f"{in_windows} key heads of those with windows"
    )
    router = grouped_sigmoid(table, scaling=1.0, groups=1, chosen=1)
    return (
        decoder(table, notes, kv_heads=4, max_positions=131072, epsilon=1e-5, partial=True)
        | attention_bias(table)
        | {"head_dim": wide, "kv_heads": in_windows, "attention_sinks": True}
        | with_places(table, _experts(table, router), dense_layers=1)
        | fourth_is_full(with_default(table, layer_types=_each_sixth(layers)), notes, default=128)
    )


def _each_sixth(layers: int) -> list[str]:
    """The first block and each sixth see everything."""
    return [
        "full_attention" if layer == 0 or (layer + 1) % 6 == 0 else "sliding_attention"
        for layer in range(layers)
    ]
