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


def _deepseek_v32(model: Model) -> Values:
    assert model.latent is not None
    assert model.latent.indexer is not None
    indexer = model.latent.indexer
    return _deepseek(model) | {
        "index_n_heads": indexer.heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.keys,
        "mlp_layer_types": None,
    }


def _glm4_moe(model: Model) -> Values:
    experts, values = _routed(model)
    return (
        _with_head_dim(model)
        | values
        | {
            "attention_bias": model.attention_bias,
            "use_qk_norm": model.qk_norm,
            "n_routed_experts": experts.experts,
            "moe_intermediate_size": experts.hidden,
            "n_shared_experts": experts.shared_hidden // experts.hidden,
            "first_k_dense_replace": experts.dense_layers,
            "norm_topk_prob": experts.router.normalised,
            "routed_scaling_factor": experts.router.scaling,
        }
    )


def _llama4(model: Model) -> Values:
    experts, values = _routed(model)
    return (
        _with_head_dim(model)
        | values
        | {
            "num_local_experts": experts.experts,
            "intermediate_size": experts.hidden,
            "intermediate_size_mlp": model.ffn_hidden,
            "interleave_moe_layer_step": len(model.networks) or 1,
            "attention_chunk_size": model.sliding_window,
        }
    )


def _minimax(model: Model) -> Values:
    experts, values = _routed(model)
    widths = {"num_local_experts": experts.experts, "intermediate_size": experts.hidden}
    return _with_head_dim(model) | values | widths


def _gated_delta(model: Model) -> Values:
    delta = model.delta
    assert delta is not None
    values = _with_head_dim(model) | {
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_conv_kernel_dim": delta.convolution,
        "layer_types": [
            {"D": "linear_attention", "A": "full_attention"}[mixer]
            for mixer, _ in model.block_kinds
        ],
    }
    if model.experts is None:
        return values
    return values | _qwen_moe(model) | {"head_dim": model.head_dim}


def _nemotron_h(model: Model) -> Values:
    mamba, letters = model.mamba, {"M-": "M", "A-": "*", "-F": "-", "-E": "E"}
    assert mamba is not None
    values = _with_head_dim(model) | {
        "hybrid_override_pattern": "".join(letters["".join(kind)] for kind in model.block_kinds),
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.groups,
        "ssm_state_size": mamba.state,
        "conv_kernel": mamba.convolution,
        "use_conv_bias": mamba.convolution_bias,
        "chunk_size": mamba.chunk,
        "num_nextn_predict_layers": 0,
    }
    del values["num_hidden_layers"]
    if model.experts is None:
        return values
    experts, active = _routed(model)
    return (
        values
        | active
        | {
            "n_routed_experts": experts.experts,
            "moe_intermediate_size": experts.hidden,
            "moe_shared_expert_intermediate_size": experts.shared_hidden,
            "routed_scaling_factor": experts.router.scaling,
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
    "deepseek-v3.2": ("deepseek_v32", _deepseek_v32),
    "deepseek-r1": ("deepseek_v3", _deepseek),
    "glm-4": ("glm4_moe", _glm4_moe),
    "llama-4": ("llama4_text", _llama4),
    "minimax-m2": ("minimax_m2", _minimax),
    "ministral-3": ("ministral3", _with_head_dim),
    "nemotron-h": ("nemotron_h", _nemotron_h),
    "nemotron-nano": ("nemotron_h", _nemotron_h),
    "nemotron-3": ("nemotron_h", _nemotron_h),
    "olmo-3": ("olmo3", _common),
    "qwen3-next": ("qwen3_next", _gated_delta),
    "qwen3-coder-next": ("qwen3_next", _gated_delta),
    "qwen3.5-27b": ("qwen3_5_text", _gated_delta),
    "qwen3.5-35b": ("qwen3_5_moe_text", _gated_delta),
    "seed-oss": ("seed_oss", _with_head_dim),
    "smollm3": ("smollm3", _common),
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


TOWERS = ("vision", "visual", "audio", "tower", "projector")
"""What the names of modules beside a text model have in them; the last joins both."""


def built_parameters(config: Values) -> tuple[int, int]:
    """Parameters that transformers builds of a config: the text model's, with its head, and those
    of the towers beside it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = transformers.AutoConfig.for_model(config["model_type"], **values)
        try:
            model = transformers.AutoModelForCausalLM.from_config(read)
        except ValueError:  # of wrappers
            model = transformers.AutoModelForImageTextToText.from_config(read)
        model.tie_weights()
    text = tower = 0
    for name, parameter in model.named_parameters():
        module = ".".join(name.split(".")[:2])
        if not any(word in module for word in TOWERS):
            text += parameter.numel()
        elif "projector" not in module:
            tower += parameter.numel()
    return text, tower
