"""Families: which published architectures the reference decoder computes exactly, and their
`config.json`.

A family is here where its forward pass is ours to the last operation. Others come near (GELU for
its tanh form, norms behind for norms before) and are refused: their weights would be another
model's.

Source: configuration and modeling modules of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import DropoutConfig, ModelConfig, RopeScalingConfig

Config = dict[str, Any]

DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "residual_dropout",
)
"""Keys of probabilities with which elements are dropped in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A `model_type`."""

    architecture: str
    fits: Callable[[ModelConfig], bool]
    """Whether a model is one of it."""
    config: Callable[[ModelConfig], Config]
    """What its `config.json` says of a model."""


def family_of(model: ModelConfig) -> str | None:
    """The `model_type` under which `model` is published; None: there is none."""
    if model.networks or model.mixers or model.attention_gate or model.window_kind != "sliding":
        return None
    return next((name for name, family in FAMILIES.items() if family.fits(model)), None)


def config_of(name: str, model: ModelConfig, dropout: DropoutConfig | None = None) -> Config:
    """The `config.json` of `model` as one of family `name`, trained with `dropout`; what the family
    has no key for it does not say."""
    family = FAMILIES[name]
    head = {"architectures": [family.architecture], "model_type": name}
    dropped = {
        key: 0.0 if dropout is None or place is None else getattr(dropout, place)
        for key, place in dropout_keys(name).items()
    }
    return {**head, "vocab_size": model.vocab, **dropped, **family.config(model)}


def rope_table(scaling: RopeScalingConfig | None) -> Config | None:
    """`rope_scaling` of a `config.json`."""
    if scaling is None:
        return None
    table: Config = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        table |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        table |= {"beta_slow": scaling.low, "beta_fast": scaling.high}
        table |= {"attention_factor": scaling.amplitude, "truncate": scaling.truncate}
        if scaling.score_factor != 1.0:  # DeepSeek's: (0.1 m ln(factor) + 1)^2
            of_all = (math.sqrt(scaling.score_factor) - 1) / (0.1 * math.log(scaling.factor))
            table |= {"mscale_all_dim": of_all}
    if scaling.kind in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = scaling.original_positions
    return table


def dropout_keys(name: str) -> dict[str, str | None]:
    """Keys of a family, and what each drops of; None: its modeling module reads it nowhere."""
    residual = {"attention_dropout": "attention", "hidden_dropout": "residual"}
    own: dict[str, dict[str, str | None]] = {
        "gpt2": {"attn_pdrop": "attention", "embd_pdrop": "embedding", "resid_pdrop": "residual"},
        "bloom": {**residual},
        "starcoder2": {
            "attention_dropout": "attention",
            "embedding_dropout": "embedding",
            "residual_dropout": "residual",
        },
        "phi3": {"attention_dropout": "attention", "embd_pdrop": None, "resid_pdrop": "residual"},
    }
    return own.get(name, {"attention_dropout": "attention"})


def longest_of(model: ModelConfig) -> int:
    """`max_position_embeddings`, beyond which dynamic scaling begins."""
    scaling = model.rope_scaling
    is_dynamic = scaling is not None and scaling.kind == "dynamic"
    return scaling.original_positions if scaling and is_dynamic else model.max_positions


def _shape(model: ModelConfig) -> Config:
    return {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": longest_of(model),
        "rope_theta": model.rope_theta,
        "rope_scaling": rope_table(model.rope_scaling),
        "tie_word_embeddings": model.tied_embeddings,
    }


def _rms(model: ModelConfig) -> Config:
    return {**_shape(model), "rms_norm_eps": model.norm_epsilon, "hidden_act": "silu"}


def _windows(model: ModelConfig) -> Config:
    return {"sliding_window": model.sliding_window or None}


def _is_llama_like(model: ModelConfig) -> bool:
    """Norms before, rotary positions, SwiGLU: what most families share."""
    return (
        (model.norm, model.positions, model.mlp) == ("rmsnorm", "rope", "swiglu")
        and not (model.post_norms or model.embedding_norm or model.attention_sinks)
        and (not model.qk_norm or model.qk_norm_width == "head")
        and (not model.sliding_window or model.full_attention_every > model.layers)
    )


def _dense(model: ModelConfig) -> bool:
    return _is_llama_like(model) and model.experts is None and model.latent is None


def _llama(model: ModelConfig) -> bool:
    return (
        _dense(model)
        and not (model.qk_norm or model.sliding_window)
        and model.attention_bias == model.attention_output_bias
    )


def _mistral(model: ModelConfig) -> bool:
    return _dense(model) and not (
        model.qk_norm or model.attention_bias or model.attention_output_bias or model.mlp_bias
    )


def _qwen2(model: ModelConfig) -> bool:
    biases = (model.attention_bias, model.attention_output_bias, model.mlp_bias)
    return _dense(model) and not model.qk_norm and biases == (True, False, False)


def _qwen3(model: ModelConfig) -> bool:
    return (
        _dense(model)
        and model.qk_norm
        and not model.mlp_bias
        and model.attention_bias == model.attention_output_bias
    )


def _qwen_windows(model: ModelConfig) -> Config:
    if not model.sliding_window:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "max_window_layers": 0, **_windows(model)}


def _routed(model: ModelConfig, **router: Any) -> bool:
    """A mixture without biases, whose router is plain but for `router`."""
    experts = model.experts
    if experts is None or experts.router_bias or experts.bias or model.mlp_bias:
        return False
    plain = {"scores": "softmax", "normalised": True, "scaling": 1.0, "groups": 1} | router
    return _is_llama_like(model) and all(
        wanted is None or getattr(experts.router, name) == wanted for name, wanted in plain.items()
    )


def _mixtral(model: ModelConfig) -> bool:
    experts = model.experts
    return (
        _routed(model)
        and experts is not None
        and not (model.latent or model.qk_norm or model.attention_bias)
        and not (experts.shared_hidden or experts.dense_layers)
    )


def _mixtral_config(model: ModelConfig) -> Config:
    assert model.experts is not None
    return {
        **_rms(model),
        "head_dim": model.head_dim,
        "intermediate_size": model.experts.hidden,
        "num_local_experts": model.experts.experts,
        "num_experts_per_tok": model.experts.active,
        **_windows(model),
    }


def _qwen_moe_config(model: ModelConfig) -> Config:
    experts = model.experts
    assert experts is not None
    return {
        **_rms(model),
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.router.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(experts.dense_layers)),
        **_qwen_windows(model),
    }


def _qwen2_moe(model: ModelConfig) -> bool:
    experts = model.experts
    return (
        _routed(model, normalised=None)
        and experts is not None
        and bool(experts.shared_hidden and experts.shared_gate)
        and (model.attention_bias, model.attention_output_bias) == (True, False)
        and not (model.latent or model.qk_norm)
    )


def _qwen2_moe_config(model: ModelConfig) -> Config:
    assert model.experts is not None
    shared = model.experts.shared_hidden
    return {**_qwen_moe_config(model), "shared_expert_intermediate_size": shared}


def _qwen3_moe(model: ModelConfig) -> bool:
    experts = model.experts
    return (
        _routed(model, normalised=None)
        and experts is not None
        and model.qk_norm
        and not (model.latent or experts.shared_hidden)
        and model.attention_bias == model.attention_output_bias
    )


def _qwen3_moe_config(model: ModelConfig) -> Config:
    bias = model.attention_bias
    return {**_qwen_moe_config(model), "head_dim": model.head_dim, "attention_bias": bias}


def _deepseek(model: ModelConfig, **router: Any) -> bool:
    experts = model.experts
    return (
        _routed(model, normalised=None, scaling=None, groups=None, **router)
        and experts is not None
        and model.latent is not None
        and not (model.qk_norm or model.sliding_window or experts.shared_gate)
        and experts.shared_hidden % experts.hidden == 0
    )


def _deepseek_config(model: ModelConfig) -> Config:
    experts, latent = model.experts, model.latent
    assert experts is not None
    assert latent is not None
    router = experts.router
    return {
        **_rms(model),
        "attention_bias": False,
        "n_routed_experts": experts.experts,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.hidden,
        "n_shared_experts": experts.shared_hidden // experts.hidden,
        "first_k_dense_replace": experts.dense_layers,
        "routed_scaling_factor": router.scaling,
        "n_group": router.groups,
        "topk_group": router.groups_chosen,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_rope_head_dim": latent.rope_head_dim,
        "qk_nope_head_dim": model.head_dim - latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
    }


def _deepseek_v2_config(model: ModelConfig) -> Config:
    assert model.experts is not None
    grouped = model.experts.router.groups > 1
    return {
        **_deepseek_config(model),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "norm_topk_prob": False,
    }


def _deepseek_v3_config(model: ModelConfig) -> Config:
    assert model.experts is not None
    return {
        **_deepseek_config(model),
        "norm_topk_prob": model.experts.router.normalised,
        "rope_interleave": True,
    }


def _has_layer_norms(model: ModelConfig, positions: str) -> bool:
    return (
        (model.norm, model.positions, model.mlp) == ("layernorm", positions, "gelu")
        and model.norm_bias
        and not (model.post_norms or model.attention_sinks or model.qk_norm)
        and model.experts is None
        and model.latent is None
    )


def _has_biases(model: ModelConfig) -> bool:
    return model.attention_bias and model.attention_output_bias and model.mlp_bias


def _one_width(model: ModelConfig) -> bool:
    return model.heads == model.kv_heads and model.heads * model.head_dim == model.hidden


def _gpt2(model: ModelConfig) -> bool:
    return (
        _has_layer_norms(model, "learned")
        and _has_biases(model)
        and _one_width(model)
        and model.tied_embeddings
        and not (model.embedding_norm or model.sliding_window)
    )


def _gpt2_config(model: ModelConfig) -> Config:
    return {
        "n_embd": model.hidden,
        "n_inner": model.ffn_hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    }


def _bloom(model: ModelConfig) -> bool:
    return (
        _has_layer_norms(model, "alibi")
        and _has_biases(model)
        and _one_width(model)
        and model.tied_embeddings
        and model.embedding_norm
        and model.ffn_hidden == 4 * model.hidden
        and not model.sliding_window
    )


def _bloom_config(model: ModelConfig) -> Config:
    return {
        "hidden_size": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "layer_norm_epsilon": model.norm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    }


def _starcoder2(model: ModelConfig) -> bool:
    biases = {model.attention_bias, model.attention_output_bias, model.mlp_bias}
    return (
        _has_layer_norms(model, "rope")
        and len(biases) == 1
        and not model.embedding_norm
        and model.heads * model.head_dim == model.hidden
        and (not model.sliding_window or model.full_attention_every > model.layers)
    )


def _starcoder2_config(model: ModelConfig) -> Config:
    return {
        **_shape(model),
        "norm_epsilon": model.norm_epsilon,
        "norm_type": "layer_norm",
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": model.mlp_bias,
        **_windows(model),
    }


def _llama_config(model: ModelConfig) -> Config:
    return {
        **_rms(model),
        "head_dim": model.head_dim,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
    }


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", fits=_llama, config=_llama_config),
    "mistral": Family(
        architecture="MistralForCausalLM",
        fits=_mistral,
        config=lambda model: {**_rms(model), "head_dim": model.head_dim, **_windows(model)},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        fits=_mistral,
        config=lambda model: {**_rms(model), **_windows(model)},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        fits=_qwen2,
        config=lambda model: {**_rms(model), **_qwen_windows(model)},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        fits=_qwen3,
        config=lambda model: {
            **_rms(model),
            "head_dim": model.head_dim,
            "attention_bias": model.attention_bias,
            **_qwen_windows(model),
        },
    ),
    "mixtral": Family(architecture="MixtralForCausalLM", fits=_mixtral, config=_mixtral_config),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM", fits=_qwen2_moe, config=_qwen2_moe_config
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM", fits=_qwen3_moe, config=_qwen3_moe_config
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        fits=lambda model: _deepseek(model),
        config=_deepseek_v2_config,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        fits=lambda model: _deepseek(model, scores="sigmoid"),
        config=_deepseek_v3_config,
    ),
    "gpt2": Family(architecture="GPT2LMHeadModel", fits=_gpt2, config=_gpt2_config),
    "bloom": Family(architecture="BloomForCausalLM", fits=_bloom, config=_bloom_config),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM", fits=_starcoder2, config=_starcoder2_config
    ),
}
"""By `model_type`; of several that fit, a model is written as the first."""
