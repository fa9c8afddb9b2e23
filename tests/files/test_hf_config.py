"""Hugging Face configs: read as transformers reads them, refused in one line when they are not."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.params import parameter_count
from fsdpplan.errors import SpecError
from fsdpplan.files.hf_config import LoadedModel, parse_hf_config, read_hf_config
from tests.refusals import check_one_line

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 1000,
}
CONFIGS: list[dict[str, Any]] = [
    LLAMA,
    LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    LLAMA | {"head_dim": 32, "num_key_value_heads": None},
    {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    LLAMA | {"model_type": "mistral", "num_attention_heads": 8, "head_dim": None},
    LLAMA | {"model_type": "mistral", "head_dim": 48},
    LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    LLAMA | {"model_type": "qwen3"},
    LLAMA | {"model_type": "qwen3", "head_dim": 64, "attention_bias": True},
    GPT2,
    GPT2 | {"n_inner": 300, "n_positions": 77, "tie_word_embeddings": False},
]


def parse(values: dict[str, Any]) -> LoadedModel:
    return parse_hf_config(json.dumps(values), where="config.json", name="mine")


@pytest.mark.parametrize("values", CONFIGS, ids=lambda values: values["model_type"])
def test_the_reference_implementation_holds_as_many_parameters(values: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    arguments = {key: value for key, value in values.items() if key != "model_type"}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own defaults
        config = transformers.AutoConfig.for_model(values["model_type"], **arguments)
        reference = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in reference.parameters())
    assert parameter_count(parse(values).model) == count


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": None},
    ],
)
def test_rotary_bases_of_old_and_new_configs_are_read(rope: dict[str, Any]) -> None:
    without = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    loaded = parse(without | rope)
    assert (loaded.model.rope_theta, loaded.notes) == (1e6, ())


def test_what_the_plan_does_not_follow_is_noted() -> None:
    scaled = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert "llama3" in parse(LLAMA | scaled).notes[0]
    assert "sliding_window 4096" in parse(LLAMA | {"model_type": "mistral"}).notes[0]
    assert parse(LLAMA | {"model_type": "mistral", "sliding_window": None}).notes == ()
    assert parse(LLAMA | {"model_type": "qwen2", "sliding_window": 4096}).notes == ()
    windowed = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 512}
    assert "512" in parse(LLAMA | windowed).notes[0]
    assert "quantization" in parse(LLAMA | {"quantization_config": {"bits": 4}}).notes[0]
    assert "tanh" in parse(GPT2 | {"activation_function": "gelu"}).notes[0]


def test_a_folder_or_a_file_may_be_named(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_hf_config(folder).model.name == "tiny-llama"
    assert read_hf_config(folder / "config.json").model.name == "tiny-llama"
    (folder / "small.json").write_text(json.dumps(LLAMA))
    assert read_hf_config(str(folder / "small.json")).model.name == "small"


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"model_type": "deepseek_v3", "n_routed_experts": 256},
        {"model_type": "gpt_oss", "num_local_experts": 32},
    ],
)
def test_mixtures_of_experts_are_refused_in_words(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="a mixture of experts, which fsdpplan does not price yet"):
        parse(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3", "text_config": {}}, "'gemma3' is not read (it holds several"),
        ({"model_type": "bert"}, "supported: gpt2, llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type must be a text"),
        ({"model_type": ["llama"]}, "model_type must be a text"),
        ({"hidden_size": None}, "hidden_size must be a whole number, not None"),
        ({"hidden_size": "256"}, "hidden_size must be a whole number, not '256'"),
        ({"hidden_size": 256.0}, "hidden_size must be a whole number"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"hidden_size": -256}, "hidden_size must be a whole number from 1"),
        ({"hidden_size": 0}, "hidden_size must be a whole number from 1"),
        ({"hidden_size": 10**30}, "hidden_size must be a whole number from 1"),
        ({"hidden_size": 258}, "num_attention_heads 4 does not divide hidden_size 258"),
        ({"num_hidden_layers": 10**9}, "no model has more than"),
        ({"vocab_size": 10**12}, "no model has more than"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"head_dim": 0}, "head_dim must be a whole number from 1"),
        ({"hidden_act": "relu"}, "hidden_act must be one of silu, swish"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"rope_theta": "10000"}, "rope_theta must be a number"),
        ({"rope_theta": -1.0}, "rope_theta must be a finite number above 0"),
        ({"rope_parameters": 7}, "rope_parameters must be a table"),
        ({"rope_parameters": {"rope_theta": [1]}}, "rope_parameters.rope_theta must be a number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
        ({"rms_norm_eps": 0}, "norm_epsilon must be a finite number above 0"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        parse(LLAMA | change)
    assert str(refusal.value).startswith("config.json")
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "intermediate_size", "vocab_size"])
def test_a_missing_shape_is_never_guessed(key: str) -> None:
    without = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(SpecError, match=f"{key} is missing"):
        parse(without)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "must hold one JSON object, not a list"),
        (b"null", "must hold one JSON object, not null"),
        (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (b'{"hidden_size": NaN}', "NaN is not a number"),
        (b'{"a": ' * 100_000, "cannot be read as JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot be read as JSON"),
        (b"\xff\xfe", "is not text"),
        (b" " * (1024 * 1024 + 1), "larger than 1024 KiB"),
    ],
)
def test_a_hostile_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SpecError) as refusal:
        read_hf_config(tmp_path)
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["none.json", "a\0b", "x" * 300])
def test_a_path_that_is_no_file_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=r"does not exist|cannot be read"):
        read_hf_config(f"{tmp_path}/{name}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200)
@given(st.sampled_from(CONFIGS), st.data())
def test_any_value_at_any_key_is_a_model_or_one_line(
    values: dict[str, Any], data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from(sorted(values)))
    changed = values | {key: data.draw(json_values)}
    try:
        model = parse(changed).model
    except SpecError as refusal:
        check_one_line(refusal)
    else:
        assert parameter_count(model) > 0
