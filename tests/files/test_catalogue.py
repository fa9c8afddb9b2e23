"""The catalogue: published counts to the parameter, and names as people type them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from fsdpplan.cost.params import parameter_count
from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.catalogue import (
    load_model,
    model_names,
    model_source,
    published_parameter_count,
)
from fsdpplan.spec.model import Model


def test_the_promised_families_are_there() -> None:
    names = " ".join(model_names())
    for name in ("gpt2-xl", "llama-2-70b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.3-70b"):
        assert name in names
    for name in ("qwen2.5-72b", "qwen3-0.6b", "qwen3-32b", "mistral-7b-v0.3", "mistral-large"):
        assert name in names


@pytest.mark.parametrize("name", model_names())
def test_a_shape_has_exactly_the_published_number_of_parameters(name: str) -> None:
    assert parameter_count(load_model(name)) == published_parameter_count(name)
    assert "Hugging Face" in model_source(name)


def huggingface_config(model: Model) -> Any:
    """The configuration of transformers that has this shape."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.mlp == "gelu":
        return transformers.GPT2Config(
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=model.ffn_hidden,
            n_positions=model.max_positions,
            **common,
        )
    common |= {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_positions,
    }
    if model.qk_norm:
        return transformers.Qwen3Config(head_dim=model.head_dim, **common)
    if model.attention_bias:
        return transformers.Qwen2Config(**common)
    if model.name.startswith("mistral"):
        return transformers.MistralConfig(head_dim=model.head_dim, **common)
    return transformers.LlamaConfig(head_dim=model.head_dim, **common)


@pytest.mark.parametrize("name", model_names())
def test_the_reference_implementation_holds_as_many_parameters(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = load_model(name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own defaults
        reference = transformers.AutoModelForCausalLM.from_config(huggingface_config(model))
    assert sum(p.numel() for p in reference.parameters()) == parameter_count(model)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("openai-community/gpt2-large", "gpt2-large"),
        (" GPT2 ", "gpt2"),
    ],
)
def test_names_of_the_hub_and_any_case_are_understood(typed: str, name: str) -> None:
    assert load_model(typed).name == name


@pytest.mark.parametrize("typed", ["llama-3.1-9b", "lama-2-7b", "qwen-3-8b", "gpt2-huge"])
def test_an_unknown_name_lists_the_nearest(typed: str) -> None:
    with pytest.raises(ProfileNotFound, match=r"nearest: \S+"):
        load_model(typed)


@pytest.mark.parametrize(
    "typed",
    ["mixtral-8x7b", "deepseek-v3", "deepseek-ai/DeepSeek-R1", "qwen3-30b-a3b", "gpt-oss-120b",
     "Qwen3-235B-A22B", "llama-4-scout", "kimi-k2"],
)  # fmt: skip
def test_mixtures_of_experts_are_refused_in_words(typed: str) -> None:
    with pytest.raises(SpecError, match="mixture of experts, which fsdpplan does not price yet"):
        load_model(typed)
