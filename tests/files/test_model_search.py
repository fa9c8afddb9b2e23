"""Models are found by parts of names, publishers, sizes and traits; each word narrows."""

from __future__ import annotations

import pytest

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.errors import ProfileNotFound
from fsdpplan.files.catalogue import load_model, model_names, model_source, published_parameters
from fsdpplan.files.model_search import TRAITS, find_models


@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (["qwen3"], {"qwen3-0.6b", "qwen3-30b-a3b"}, {"qwen2.5-7b"}),
        (["Qwen-3", "MOE"], {"qwen3-235b-a22b"}, {"qwen3-8b", "qwen2-57b-a14b"}),
        (["llama 70b"], {"llama-2-70b", "llama-3.3-70b"}, {"llama-3.1-8b", "qwen2.5-72b"}),
        (["70b"], {"llama-3-70b"}, {"llama-3.1-405b"}),
        (["7b..9b", "gqa"], {"llama-3-8b", "mistral-7b-v0.1"}, {"llama-2-7b", "qwen3-14b"}),
        (["<=1b"], {"gpt2", "qwen3-0.6b"}, {"llama-3.2-1b"}),
        (["..1b"], {"gpt2", "qwen3-0.6b"}, {"llama-3.2-1b"}),
        ([">500b"], {"deepseek-v3", "kimi-k2"}, {"qwen3-coder-480b-a35b"}),
        (["8b"], {"llama-3.1-8b", "qwen3-8b"}, {"megatron-18b"}),
        (["meta-llama"], {"llama-2-7b", "llama-3.3-70b"}, {"qwen3-8b"}),
        (["mla"], {"deepseek-v2-lite", "kimi-k2"}, {"qwen3-8b"}),
        (["windows", "google"], {"gemma-3-4b"}, {"gemma-7b"}),
    ],
)
def test_each_word_narrows_the_search(words: list[str], some: set[str], none: set[str]) -> None:
    found = set(find_models(words))
    assert some <= found
    assert not none & found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", model_names())
def test_a_model_is_found_by_its_name_its_repository_its_size_and_its_traits(name: str) -> None:
    assert find_models([name.upper()]) == (name,)
    model = load_model(name)
    assert published_parameters(name) == parameter_count(model)
    for trait, has in TRAITS.items():
        if has(model):
            assert name in find_models([trait, name.replace("-", " ")])
    size = f"{parameter_count(model) / 1e6:.0f}m"
    assert name in find_models([size])
    source = model_source(name).split()
    if source[0] == "config.json":
        assert name in find_models([source[2].rstrip(";")])


def test_no_words_find_all_and_the_order_is_the_catalogues() -> None:
    assert list(find_models([])) == list(find_models([" "])) == model_names()
    places = [model_names().index(name) for name in find_models(["moe"])]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lamma-3-8b"], r"no model matches 'lamma-3-8b'; nearest: llama-3-8b"),
        (["qwen3", "sinks"], r"each word by itself does, so leave one out"),
        (["qwen3", "zebra"], r"nothing has 'zebra'"),
        (["x" * 5000], r"no model matches"),
        (["\0"], r"no model matches"),
        ([".."], r"a size \(70b, 7b\.\.14b\)"),
    ],
)
def test_nothing_found_says_what_to_type(words: list[str], said: str) -> None:
    with pytest.raises(ProfileNotFound, match=said) as error:
        find_models(words)
    assert "`fsdpplan models` lists all" in str(error.value)
