"""Hugging Face configs: read as transformers reads them, refused in one line when they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.huggingface.config import LoadedModel, parse_hf_config, read_hf_config
from fsdpplan.spec.model import Experts, LatentAttention, RopeScaling, Router
from fsdpplan.spec.training import Dropout
from tests.files.references import reference_parameters
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
NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN2_MOE = LLAMA | {
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 160,
}
QWEN3_MOE = QWEN2_MOE | {"model_type": "qwen3_moe", "head_dim": 32}
DEEPSEEK: dict[str, Any] = LLAMA | {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 64, "sliding_window": 512}
BLOOM = {"model_type": "bloom", "hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1000}
MPT = {"model_type": "mpt", "d_model": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 1000}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 128,
    "ffn_dim": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
FALCON: dict[str, Any] = {
    "model_type": "falcon",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
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
    MIXTRAL,
    MIXTRAL | {"head_dim": 32, "sliding_window": 256},
    QWEN3_MOE,
    QWEN3_MOE | {"mlp_only_layers": [0], "attention_bias": True},
    QWEN2_MOE,
    QWEN2_MOE | {"qkv_bias": False, "mlp_only_layers": [0]},
    DEEPSEEK,
    DEEPSEEK | {"q_lora_rank": 48, "n_shared_experts": 1, "first_k_dense_replace": 0},
    DEEPSEEK | {"model_type": "deepseek_v3", "q_lora_rank": 48, "n_group": 2, "topk_group": 1},
    {**MIXTRAL, "model_type": "gpt_oss"},
    {**MIXTRAL, "model_type": "gpt_oss", "attention_bias": False, "head_dim": 32},
    LLAMA | {"model_type": "gemma"},
    LLAMA | {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": False},
    LLAMA | {"model_type": "gemma2", "head_dim": 64},
    GEMMA3,
    LLAMA | {"model_type": "olmo2"},
    LLAMA | {"model_type": "olmo2", "num_key_value_heads": None, "attention_bias": True},
    LLAMA | {"model_type": "phi3", "pad_token_id": None},
    NEOX,
    NEOX | {"tie_word_embeddings": True, "attention_bias": False, "use_parallel_residual": False},
    BLOOM,
    MPT,
    MPT | {"tie_word_embeddings": False},
    OPT,
    OPT | {"enable_bias": False, "max_position_embeddings": 77, "tie_word_embeddings": False},
    LLAMA | {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh"},
    LLAMA | {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": False},
    LLAMA | {"model_type": "nemotron", "hidden_act": "relu2"},
    LLAMA | {"model_type": "nemotron", "hidden_act": "relu2", "head_dim": 32, "mlp_bias": True},
    FALCON,
    FALCON | {"new_decoder_architecture": False, "parallel_attn": False, "alibi": True},
    FALCON | {"new_decoder_architecture": False, "parallel_attn": False, "multi_query": False},
    FALCON | {"bias": True, "ffn_hidden_size": 300},
]


def parse(values: dict[str, Any]) -> LoadedModel:
    return parse_hf_config(json.dumps(values), where="config.json", name="mine")


@pytest.mark.parametrize("values", CONFIGS, ids=lambda values: values["model_type"])
def test_the_reference_implementation_holds_as_many_parameters(values: dict[str, Any]) -> None:
    arguments = {key: value for key, value in values.items() if key != "model_type"}
    assert parameter_count(parse(values).model) == reference_parameters(
        values["model_type"], arguments
    )


def test_experts_and_latents_are_read_as_they_are() -> None:
    model = parse(DEEPSEEK).model
    assert model.experts == Experts(
        experts=8,
        active=3,
        hidden=96,
        shared_hidden=192,
        dense_layers=1,
        router=Router(normalised=False),
    )
    assert model.latent == LatentAttention(kv_rank=64, rope_head_dim=16, value_head_dim=24)
    assert (model.head_dim, model.kv_heads, model.dense_blocks) == (48, 4, 1)
    # the coefficient of its class is nobody's
    gpt_oss = parse({**MIXTRAL, "model_type": "gpt_oss", "router_aux_loss_coef": 0.9}).model
    assert gpt_oss.attention_sinks
    assert gpt_oss.experts == Experts(experts=4, active=2, hidden=704, router_bias=True, bias=True)
    assert gpt_oss.experts.router.aux_loss_coef is None


def test_routers_are_read_as_they_are() -> None:
    grouped = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3}
    v2 = parse(DEEPSEEK | grouped | {"routed_scaling_factor": 16.0}).model
    v3 = parse(DEEPSEEK | {"model_type": "deepseek_v3", "q_lora_rank": 8, "n_group": 4}).model
    assert v2.experts is not None
    assert v3.experts is not None
    assert v2.experts.router == Router(normalised=False, scaling=16.0, groups=4, groups_chosen=3)
    assert v3.experts.router == Router(
        scores="sigmoid", scaling=2.5, groups=4, groups_chosen=4, group_best=2
    )
    for words, normalised in (({}, False), ({"norm_topk_prob": True}, True)):
        qwen = parse(QWEN3_MOE | words).model.experts
        assert qwen is not None
        assert qwen.router == Router(normalised=normalised)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("values", "window", "windowed_blocks"),
    [
        (LLAMA | {"model_type": "mistral"}, 4096, 2),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, 0, 0),
        (LLAMA | {"model_type": "gemma2", "num_hidden_layers": 26}, 4096, 13),
        (GEMMA3 | {"num_hidden_layers": 62}, 512, 52),
        (GEMMA3 | {"num_hidden_layers": 6, "sliding_window_pattern": 3}, 512, 4),
        (GEMMA3 | {"layer_types": [SLIDING, FULL]}, 512, 1),
        (GEMMA3 | {"layer_types": [FULL, FULL]}, 0, 0),
        (GEMMA3 | {"layer_types": [FULL, SLIDING]}, 512, 1),
        ({**MIXTRAL, "model_type": "gpt_oss", "num_hidden_layers": 24}, 128, 12),
        (LLAMA | {"model_type": "qwen2", "sliding_window": 4096}, 0, 0),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True}, 0, 0),
        (LLAMA | {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0,
                  "sliding_window": 77}, 77, 2),
    ],
)  # fmt: skip
def test_windows_and_their_pattern_are_read(
    values: dict[str, Any], window: int, windowed_blocks: int
) -> None:
    model = parse(values).model
    assert (model.sliding_window, model.windowed_blocks) == (window, windowed_blocks)


def test_the_text_model_of_gemma_3_with_vision_is_read() -> None:
    # as google/gemma-3-27b-pt writes it: the class holds the vocabulary
    text = {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_hidden_layers": 62,
        "head_dim": 128,
        "sliding_window": 1024,
    }
    loaded = parse({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert parameter_count(loaded.model) == parameter_count(load_model("gemma-3-27b"))
    assert loaded.model.rope_theta == 1e6
    assert "vision tower" in loaded.notes[0]


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
    scaled = {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}
    assert "longrope" in parse(LLAMA | scaled).notes[0]
    assert "sliding_window 4096" in parse(LLAMA | {"model_type": "mistral"}).notes[0]
    assert parse(LLAMA | {"model_type": "mistral", "sliding_window": None}).notes == ()
    assert parse(LLAMA | {"model_type": "qwen2", "sliding_window": 4096}).notes == ()
    assert "side by side" in parse(NEOX).notes[1]
    assert "rotary_pct 0.25" in parse(NEOX).notes[2]
    assert "behind attention" in parse(LLAMA | {"model_type": "olmo2"}).notes[0]
    v3 = DEEPSEEK | {"model_type": "deepseek_v3", "n_group": 4}
    extra_layer = v3 | {"num_nextn_predict_layers": 1}
    assert "second token" in parse(extra_layer).notes[0]
    assert "quantization" in parse(LLAMA | {"quantization_config": {"bits": 4}}).notes[0]
    assert "tanh" in parse(GPT2 | {"activation_function": "gelu"}).notes[0]


def test_what_changes_results_but_no_price_is_read_and_noted() -> None:
    """Rules of the trainer refuse a launch, never a price."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    for truncate in (True, False):
        found = parse(LLAMA | {"rope_scaling": yarn | {"truncate": truncate}}).model.rope_scaling
        assert found is not None
        assert found.truncate is truncate
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit"):
        assert parse(LLAMA | {key: None}).notes == ()
        assert f"{key} 30.0 is left out" in parse(LLAMA | {key: 30.0}).notes[0]


def test_dynamic_positions_begin_where_the_model_says() -> None:
    scaled = {"rope_scaling": {"type": "dynamic", "factor": 8.0}, "max_position_embeddings": 4096}
    found = parse(LLAMA | scaled).model.rope_scaling
    assert found == RopeScaling(kind="dynamic", factor=8.0, original_positions=4096)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, None),
        (LLAMA | {"attention_dropout": 0.1}, Dropout(attention=0.1)),
        (GPT2, Dropout(attention=0.1, residual=0.1, embedding=0.1)),
        (GPT2 | {"attn_pdrop": 0, "resid_pdrop": 0.2, "embd_pdrop": 0}, Dropout(residual=0.2)),
        (NEOX | {"hidden_dropout": 0.3}, Dropout(residual=0.3, embedding=0.3)),
    ],
)
def test_what_a_config_drops_is_read_with_its_familys_defaults(
    config: dict[str, Any], expected: Dropout | None
) -> None:
    assert parse(config).dropout == expected


def test_dropout_that_no_module_of_the_family_reads_is_noted() -> None:
    assert "resid_pdrop 0.1" in parse(LLAMA | {"resid_pdrop": 0.1}).notes[0]
    with pytest.raises(SpecError, match="attention_dropout"):
        parse(LLAMA | {"attention_dropout": 1.5})


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
        {"model_type": "new_moe", "num_experts": 64},
        {"model_type": "dbrx", "moe_intermediate_size": 128},
        {"model_type": "llama", "num_local_experts": 8},
    ],
)
def test_mixtures_of_other_families_are_refused_in_words(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"a mixture of experts of a family that is not read"):
        parse(LLAMA | change)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (MIXTRAL | {"num_experts_per_tok": 5}, "cannot visit 5 of 4 experts"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts must be a whole number"),
        ({**MIXTRAL, "num_experts_per_tok": 0}, "num_experts_per_tok must be a whole number"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
        (QWEN3_MOE | {"mlp_only_layers": [1]}, "mlp_only_layers must be a list 0, 1"),
        (QWEN3_MOE | {"mlp_only_layers": 1}, "mlp_only_layers must be a list 0, 1"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias must be false"),
        (DEEPSEEK | {"first_k_dense_replace": 9}, "9 dense layers are more than all 3"),
        (DEEPSEEK | {"num_key_value_heads": 2}, "a key and a value for each query head"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank must be a whole number"),
        (GEMMA3 | {"hidden_activation": "silu"}, "hidden_activation must be one of gelu_new"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "only causal attention is planned"),
        (GEMMA3 | {"layer_types": [SLIDING]}, "layer_types must be a list of 2 kinds"),
        (GEMMA3 | {"layer_types": ["linear", "linear"]}, "layer_types has 'linear': the kinds of"),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
         "max_window_layers must be 0 (all slide) or at least 2"),
        (OPT | {"word_embed_proj_dim": 64}, "word_embed_proj_dim must be hidden_size 128"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before must be true"),
        (MPT | {"no_bias": False}, "no_bias must be true"),
        (MPT | {"expansion_ratio": 3}, "expansion_ratio must be 4"),
        (MPT | {"attn_config": {"alibi": False}}, "attn_config.alibi must be true"),
        (MPT | {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type must be one of"),
        (FALCON | {"new_decoder_architecture": False}, "one norm for attention"),
        (FALCON | {"num_ln_in_parallel_attn": 1}, "one norm for attention"),
    ],
)  # fmt: skip
def test_a_variant_that_is_not_priced_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        parse(values)
    assert str(refusal.value).startswith("config.json: ")
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bark", "text_config": {}}, "'bark' is not read (it holds several"),
        ({"model_type": "gemma3n", "text_config": {}}, "'gemma3n' is not planned: each block"),
        ({"model_type": "gemma3", "text_config": {}}, "text_config.num_hidden_layers is missing"),
        ({"model_type": "bert"}, "supported: afmoe, apertus"),
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
