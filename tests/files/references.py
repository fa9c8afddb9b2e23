"""The configuration of transformers that has the shape of a catalogue model, by its family."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from fsdpplan.spec.model import Experts, LatentAttention, Model

Values = dict[str, Any]


def reference_parameters(model_type: str, values: Values) -> int:
    """Parameters that transformers builds, on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own defaults
        config = transformers.AutoConfig.for_model(model_type, **values)
        reference = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in reference.parameters())


def _common(model: Model) -> Values:
    return {
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_positions,
        "pad_token_id": None,
    }


def _with_head_dim(model: Model) -> Values:
    return _common(model) | {"head_dim": model.head_dim}


def _routed(model: Model) -> tuple[Experts, Values]:
    assert model.experts is not None
    return model.experts, {"num_experts_per_tok": model.experts.active}


def _mixtral(model: Model) -> Values:
    experts, values = _routed(model)
    return _with_head_dim(model) | values | {"num_local_experts": experts.experts}


def _gpt_oss(model: Model) -> Values:
    return _mixtral(model) | {"intermediate_size": _routed(model)[0].hidden}


def _qwen_moe(model: Model) -> Values:
    experts, values = _routed(model)
    values |= {
        "num_experts": experts.experts,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.router.normalised,
    }
    if experts.shared_hidden:
        values["shared_expert_intermediate_size"] = experts.shared_hidden
        return _common(model) | values
    return _with_head_dim(model) | values


def _deepseek(model: Model) -> Values:
    experts, values = _routed(model)
    latent = model.latent
    assert isinstance(latent, LatentAttention)
    return (
        _common(model)
        | values
        | {
            "n_routed_experts": experts.experts,
            "moe_intermediate_size": experts.hidden,
            "n_shared_experts": experts.shared_hidden // experts.hidden,
            "first_k_dense_replace": experts.dense_layers,
            "norm_topk_prob": experts.router.normalised,
            "routed_scaling_factor": experts.router.scaling,
            "topk_method": "group_limited_greedy" if experts.router.groups > 1 else "greedy",
            "n_group": experts.router.groups,
            "topk_group": experts.router.groups_chosen,
            "kv_lora_rank": latent.kv_rank,
            "q_lora_rank": latent.query_rank or None,
            "qk_rope_head_dim": latent.rope_head_dim,
            "qk_nope_head_dim": model.head_dim - latent.rope_head_dim,
            "v_head_dim": latent.value_head_dim,
        }
    )


def _gpt2(model: Model) -> Values:
    return {
        "vocab_size": model.vocab,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn_hidden,
        "n_positions": model.max_positions,
        "tie_word_embeddings": model.tied_embeddings,
    }


def _opt(model: Model) -> Values:
    two_more = {"max_position_embeddings": model.max_positions - 2}
    return _common(model) | two_more | {"ffn_dim": model.ffn_hidden}


def _bloom(model: Model) -> Values:
    return _common(model) | {"n_layer": model.layers, "n_head": model.heads}


def _mpt(model: Model) -> Values:
    return {
        "vocab_size": model.vocab,
        "d_model": model.hidden,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "expansion_ratio": model.ffn_hidden // model.hidden,
    }


def _falcon(model: Model) -> Values:
    return _common(model) | {"new_decoder_architecture": True, "num_kv_heads": model.kv_heads}


FAMILIES: dict[str, tuple[str, Callable[[Model], Values]]] = {
    "gpt2": ("gpt2", _gpt2),
    "gpt3": ("gpt2", _gpt2),
    "megatron": ("gpt2", _gpt2),
    "llama": ("llama", _with_head_dim),
    "qwen1.5-moe": ("qwen2_moe", _qwen_moe),
    "qwen2-57b": ("qwen2_moe", _qwen_moe),
    "qwen2.5": ("qwen2", _common),
    "qwen3-30b": ("qwen3_moe", _qwen_moe),
    "qwen3-235b": ("qwen3_moe", _qwen_moe),
    "qwen3-coder": ("qwen3_moe", _qwen_moe),
    "qwen3": ("qwen3", _with_head_dim),
    "mistral": ("mistral", _with_head_dim),
    "mixtral": ("mixtral", _mixtral),
    "deepseek-v2": ("deepseek_v2", _deepseek),
    "deepseek-v3": ("deepseek_v3", _deepseek),
    "kimi-k2": ("deepseek_v3", _deepseek),
    "gpt-oss": ("gpt_oss", _gpt_oss),
    "gemma-2-": ("gemma2", _with_head_dim),
    "gemma-3-": ("gemma3_text", _with_head_dim),
    "gemma": ("gemma", _with_head_dim),
    "olmo-2": ("olmo2", _common),
    "phi": ("phi3", _common),
    "starcoder2": ("starcoder2", _common),
    "falcon": ("falcon", _falcon),
    "opt": ("opt", _opt),
    "bloom": ("bloom", _bloom),
    "pythia": ("gpt_neox", _common),
    "gpt-neox": ("gpt_neox", _common),
    "mpt": ("mpt", _mpt),
    "nemotron": ("nemotron", _with_head_dim),
}
"""(model_type, values) by the start of a catalogue name; of several starts the longest counts."""


def reference(model: Model) -> tuple[str, Values]:
    """The model_type and configuration values of `model` in transformers."""
    start = max((s for s in FAMILIES if model.name.startswith(s)), key=len)
    model_type, values = FAMILIES[start]
    return model_type, values(model)
