"""Configs whose blocks are not all alike: read as published, or refused naming the kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.huggingface.config import LoadedModel, parse_hf_config
from fsdpplan.spec.model import DeltaRule, Experts, Indexer, Mamba2, Router

BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}
LLAMA4 = BASE | {
    "model_type": "llama4_text",
    "intermediate_size_mlp": 1024,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
NEXT = BASE | {
    "model_type": "qwen3_next",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "partial_rotary_factor": 0.25,
}
NEMOTRON = BASE | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*EM-ME",
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "routed_scaling_factor": 2.5,
}


def parse(values: dict[str, Any]) -> LoadedModel:
    return parse_hf_config(json.dumps(values), where="config.json", name="tiny")


def test_llama_4_is_read_with_and_without_its_vision_tower() -> None:
    read = parse(LLAMA4)
    model = read.model
    assert (model.networks, model.window_kind, model.sliding_window) == ("FE", "chunked", 8192)
    assert (model.full_attention_every, model.ffn_hidden) == (4, 1024)
    assert model.experts == Experts(
        experts=4,
        active=1,
        hidden=704,
        shared_hidden=704,
        router=Router(scores="sigmoid", normalised=False),
    )
    assert any("positions in each one" in note for note in read.notes)
    with_vision = parse({"model_type": "llama4", "text_config": LLAMA4, "vision_config": {}})
    assert with_vision.model == model
    assert any("vision tower" in note for note in with_vision.notes)
    every = parse(LLAMA4 | {"interleave_moe_layer_step": 1}).model
    assert (every.networks, every.experts) == ("", model.experts)
    listed = parse(LLAMA4 | {"moe_layers": [1, 3, 5, 7]}).model
    assert listed == model


def test_linear_and_full_attention_are_read_by_interval_and_by_list() -> None:
    read = parse(NEXT)
    model = read.model
    assert model.mixers == "DDDA"
    assert model.attention_gate
    assert model.qk_norm
    assert model.delta == DeltaRule(
        key_heads=4, value_heads=8, key_head_dim=32, value_head_dim=32, convolution=4
    )
    assert any("partial_rotary_factor" in note for note in read.notes)
    kinds = ["linear_attention", "full_attention"] * 4
    assert parse(NEXT | {"layer_types": kinds}).model.mixers == "DA"
    assert parse(NEXT | {"layer_types": ["full_attention"] * 8}).model.delta is None
    dense = {key: value for key, value in NEXT.items() if "expert" not in key}
    text = {"model_type": "qwen3_5", "text_config": dense | {"model_type": "qwen3_5_text"}}
    assert parse(text).model.mixers == "DDDA"
    assert parse(text).model.experts is None
    moe = {"model_type": "qwen3_5_moe", "text_config": NEXT, "tie_word_embeddings": False}
    assert parse(moe).model.experts == model.experts


def test_a_pattern_of_blocks_of_one_branch_is_read_by_letters_and_by_words() -> None:
    model = parse(NEMOTRON).model
    assert "".join(mixer for mixer, _ in model.block_kinds) == "M-A-M-M-"
    assert "".join(network for _, network in model.block_kinds) == "-E-E-F-E"
    assert model.mamba == Mamba2(heads=8, head_dim=64, groups=2, state=32)
    assert model.experts is not None
    assert model.experts.shared_hidden == 256
    words = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    listed = {k: v for k, v in NEMOTRON.items() if k != "hybrid_override_pattern"}
    listed["layers_block_type"] = [words[letter] for letter in "ME*EM-ME"]
    assert parse(listed).model.block_kinds == model.block_kinds
    without = parse(NEMOTRON | {"hybrid_override_pattern": "M-M*"}).model
    assert (without.layers, without.experts) == (4, None)


def test_the_indexer_of_sparse_attention_is_read() -> None:
    latent = load_model("deepseek-v3.2").latent
    assert latent is not None
    assert latent.indexer == Indexer(heads=64, head_dim=128, keys=2048)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (NEXT | {"layer_types": ["ring_attention"] * 8}, "has 'ring_attention': the kinds of"),
        (NEXT | {"layer_types": ["full_attention"]}, "a list of 8 kinds"),
        (NEXT | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (NEMOTRON | {"hybrid_override_pattern": "MX*"}, "has 'X': the kinds of blocks"),
        (NEMOTRON | {"layers_block_type": ["rwkv"]}, "has 'rwkv': the kinds of blocks"),
        (NEMOTRON | {"moe_latent_size": 64}, "latent space"),
        (LLAMA4 | {"moe_layers": [9]}, "moe_layers"),
        (LLAMA4 | {"layer_types": ["mamba"] * 8}, "has 'mamba': the kinds of blocks"),
        ({k: v for k, v in NEXT.items() if k != "linear_num_key_heads"}, "is missing; add it"),
        ({"model_type": "qwen3_nxt"}, "nearest: qwen3_next"),
    ],
)
def test_a_kind_that_is_not_planned_is_refused_by_its_name(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as refusal:
        parse(values)
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("config.json")
