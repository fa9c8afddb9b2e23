"""The catalogue: published counts to the parameter, and names as people type them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files import catalogue
from fsdpplan.files.catalogue import (
    load_model,
    model_names,
    model_source,
)
from fsdpplan.files.huggingface.config import parse_hf_config
from tests.files.references import reference, reference_parameters

PUBLISHED = tomllib.loads((Path(catalogue.__file__).parent / "models.toml").read_text())
"""Among it, the parameters that the publisher's weights hold; of a shape from a paper, those that
transformers builds."""


def test_the_promised_families_are_there() -> None:
    names = " ".join(model_names())
    assert len(model_names()) >= 45
    for name in ("gpt2-xl", "llama-2-70b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.3-70b"):
        assert name in names
    for name in ("qwen2.5-72b", "qwen3-0.6b", "qwen3-32b", "mistral-7b-v0.3", "mistral-large"):
        assert name in names
    for name in ("llama-4-scout", "llama-4-maverick", "glm-4.5-air", "deepseek-r1", "deepseek-v3.2",
                 "qwen3-next-80b-a3b", "qwen3.5-27b", "nemotron-3-nano", "minimax-m2", "smollm3-3b",
                 "kimi-k2-thinking", "olmo-3-32b", "ministral-3-14b"):  # fmt: skip
        assert name in names
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "mixtral-8x22b", "gemma-3-27b",
                 "olmo-2-32b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-120b", "gpt3-175b",
                 "megatron-1t", "mpt-30b", "nemotron-4-340b", "bloom-176b"):  # fmt: skip
        assert name in names


@pytest.mark.parametrize("name", model_names())
def test_a_shape_has_exactly_the_published_number_of_parameters(name: str) -> None:
    assert parameter_count(load_model(name)) == PUBLISHED[name]["parameters"]
    assert "Hugging Face" in model_source(name) or "arXiv" in model_source(name)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", model_names())
def test_the_reference_implementation_holds_as_many_parameters(name: str) -> None:
    model = load_model(name)
    model_type, values = reference(model)
    assert reference_parameters(model_type, values) == parameter_count(model)


@pytest.mark.parametrize("name", model_names())
def test_the_config_of_the_reference_is_read_as_the_same_shape(name: str) -> None:
    model = load_model(name)
    model_type, values = reference(model)
    text = json.dumps({"model_type": model_type, **values})
    read = parse_hf_config(text, where="config.json", name=name).model
    assert parameter_count(read) == parameter_count(model)
    assert active_parameter_count(read) == active_parameter_count(model)
    assert (read.experts, read.latent) == (model.experts, model.latent)
    assert (read.delta, read.mamba, read.block_kinds) == (
        model.delta,
        model.mamba,
        model.block_kinds,
    )
    assert (read.window_kind, read.attention_gate) == (model.window_kind, model.attention_gate)


@pytest.mark.parametrize(
    ("name", "published_billions", "without_embedding"),
    [
        ("mixtral-8x7b", 12.9, False),  # model card
        ("mixtral-8x22b", 39, False),
        ("qwen3-30b-a3b", 3.3, False),  # Qwen 3 report, arXiv 2505.09388
        ("qwen3-235b-a22b", 22, False),
        ("qwen3-coder-480b-a35b", 35, False),
        ("qwen2-57b-a14b", 14, False),
        ("deepseek-v2-lite", 2.4, True),  # arXiv 2405.04434
        ("deepseek-v2", 21, False),
        ("deepseek-v3", 37, False),  # arXiv 2412.19437
        ("kimi-k2", 32, True),
        ("gpt-oss-20b", 3.61, True),  # model card, table 1: unembedding in, embedding out
        ("gpt-oss-120b", 5.13, True),
        ("llama-4-scout-17b-16e", 17, False),  # model cards
        ("llama-4-maverick-17b-128e", 17, False),
        ("glm-4.5", 32, 2),  # arXiv 2508.06471, table 1: embedding and head out
        ("glm-4.5-air", 12, 2),
        ("minimax-m2", 10, 2),
        ("nemotron-3-nano-30b-a3b", 3.2, True),  # model card: 3.6 with embeddings
    ],
)
def test_active_parameters_are_the_published_ones(
    name: str, published_billions: float, without_embedding: int
) -> None:
    model = load_model(name)
    active = active_parameter_count(model) - model.vocab * model.hidden * without_embedding
    assert active / 1e9 == pytest.approx(published_billions, rel=0.025)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("openai-community/gpt2-large", "gpt2-large"),
        (" GPT2 ", "gpt2"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("bigscience/bloom", "bloom-176b"),
        ("llama-4-scout", "llama-4-scout-17b-16e"),
        ("nemotron-3-nano", "nemotron-3-nano-30b-a3b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
    ],
)
def test_names_of_the_hub_and_any_case_are_understood(typed: str, name: str) -> None:
    assert load_model(typed).name == name


@pytest.mark.parametrize("typed", ["llama-3.1-9b", "lama-2-9b", "qwen-3-9b", "gpt2-huge"])
def test_an_unknown_name_lists_the_nearest(typed: str) -> None:
    with pytest.raises(ProfileNotFound, match=r"nearest: \S+"):
        load_model(typed)


@pytest.mark.parametrize("typed", ["xai-org/grok-1", "dbrx", "olmoe"])
def test_an_unknown_mixture_of_experts_is_refused_with_the_other_ways(typed: str) -> None:
    with pytest.raises(
        SpecError, match=r"mixture of experts; .*--config, .*--params 235e9 --active-params 22e9"
    ):
        load_model(typed)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout-17b-16e"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("zai-org/GLM-4.5-Air-FP8", "glm-4.5-air"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2-thinking"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
    ],
)
def test_what_was_trained_further_has_the_shape_of_its_base(typed: str, name: str) -> None:
    assert load_model(typed).name == name


@pytest.mark.parametrize("name", model_names())
def test_a_model_of_the_catalogue_and_its_variants_are_that_model(name: str) -> None:
    assert load_model(name).name == name
    if not name.endswith("-thinking"):  # one that was trained further and is listed itself
        assert load_model(f"{name}-instruct").name == name


@pytest.mark.parametrize("typed", ["deepseek-r1-distill-qwen-7b", "llama-3.1-9b-instruct"])
def test_a_distilled_or_unknown_model_is_nobodys_variant(typed: str) -> None:
    with pytest.raises(SpecError):
        load_model(typed)
