"""Small models of Hugging Face and the plans' models that they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trainer import plans
from tests.trainer.hf_names import alibi_names, gemma_names, gpt2_names, gpt_oss_names, llama_names

VOCAB = 61
WIDTHS: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OURS: dict[str, Any] = {"layers": 3, "ffn_hidden": 40, "head_dim": 16, "qk_norm": False}
MIXTURE = {"num_experts_per_tok": 2, "norm_topk_prob": True}
ALIBI: dict[str, Any] = {
    "positions": "alibi",
    "mlp": "gelu",
    "norm": "layernorm",
    "kv_heads": 4,
    "qk_norm": False,
}
QWEN2_MOE = (
    WIDTHS
    | MIXTURE
    | {
        "num_experts": 6,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "qkv_bias": True,
    }
)
QWEN2_EXPERTS: dict[str, Any] = {
    "experts": 6,
    "active": 2,
    "hidden": 20,
    "shared_hidden": 28,
    "shared_gate": True,
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[..., Any]]] = {
    "llama": ("Llama", WIDTHS, OURS, llama_names),
    "qwen2": ("Qwen2", WIDTHS, OURS | {"attention_bias": True}, llama_names),
    "qwen3": ("Qwen3", WIDTHS, OURS | {"qk_norm": True}, llama_names),
    "mistral_window": (
        "Mistral",
        WIDTHS | {"sliding_window": 7},
        OURS | {"sliding_window": 7, "full_attention_every": 99},
        llama_names,
    ),
    "mixtral": (
        "Mixtral",
        WIDTHS | {"num_local_experts": 6, "num_experts_per_tok": 2},
        OURS | {"experts": {"experts": 6, "active": 2, "hidden": 40}},
        llama_names,
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        WIDTHS | MIXTURE | {"num_experts": 6, "moe_intermediate_size": 20, "mlp_only_layers": [0]},
        OURS
        | {
            "qk_norm": True,
            "experts": {"experts": 6, "active": 2, "hidden": 20, "dense_layers": 1},
        },
        llama_names,
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        QWEN2_MOE,
        OURS | {"attention_bias": True, "experts": QWEN2_EXPERTS},
        llama_names,
    ),
    "qwen2_moe, not normalised": (
        "Qwen2Moe",
        QWEN2_MOE | {"norm_topk_prob": False},
        OURS
        | {"attention_bias": True, "experts": QWEN2_EXPERTS | {"router": {"normalised": False}}},
        llama_names,
    ),
    "deepseek_v3": (
        "DeepseekV3",
        WIDTHS
        | {
            "num_key_value_heads": 4,
            "head_dim": 6,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 10,
            "v_head_dim": 14,
            "n_routed_experts": 6,
            "num_local_experts": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 20,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "rope_interleave": False,
        },
        OURS
        | {
            "kv_heads": 4,
            "latent": {"kv_rank": 24, "rope_head_dim": 6, "value_head_dim": 14, "query_rank": 20},
            "experts": {
                "experts": 6,
                "active": 2,
                "hidden": 20,
                "shared_hidden": 40,
                "dense_layers": 1,
                "router": {
                    "scores": "sigmoid",
                    "scaling": 2.5,
                    "groups": 3,
                    "groups_chosen": 2,
                    "group_best": 2,
                },
            },
        },
        llama_names,
    ),
    "gpt_oss": (
        "GptOss",
        WIDTHS
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "swiglu_alpha": 1.0,
            "swiglu_limit": 1e9,
            "attention_bias": True,
        },
        OURS
        | {
            "attention_bias": True,
            "attention_output_bias": True,
            "attention_sinks": True,
            "sliding_window": 7,
            "full_attention_every": 2,
            "experts": {
                "experts": 6,
                "active": 2,
                "hidden": 40,
                "router_bias": True,
                "bias": True,
            },
        },
        gpt_oss_names,
    ),
    "gemma2": (
        "Gemma2",
        WIDTHS
        | {
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 7,
        },
        OURS
        | {
            "mlp": "geglu",
            "post_norms": True,
            "sliding_window": 7,
            "full_attention_every": 2,
        },
        gemma_names,
    ),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 48,
            "n_layer": 4,
            "n_head": 4,
            "n_inner": 96,
            "vocab_size": VOCAB,
            "n_positions": 64,
        },
        plans.GPT2_STYLE,
        gpt2_names,
    ),
    "bloom": (
        "Bloom",
        {"hidden_size": 48, "n_layer": 4, "n_head": 4, "vocab_size": VOCAB},
        plans.GPT2_STYLE | ALIBI | {"ffn_hidden": 192, "embedding_norm": True},
        alibi_names,
    ),
    "mpt": (
        "Mpt",
        {"d_model": 48, "n_layers": 4, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 64},
        ALIBI | {"ffn_hidden": 192, "norm_bias": False, "tied_embeddings": True},
        alibi_names,
    ),
}
"""Hugging Face class, its config, our model, and what renames the weights."""
