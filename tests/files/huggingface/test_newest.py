"""Configs of the newest families: as many parameters as transformers builds, or the reason why not.

`tests/golden/huggingface_configs.jsonl` has a config a line, in the shape of a published model or
as the class of transformers 5.23.0 has it, and what `from_config` builds of it on the meta device:
`parameters` of the text model with its head, `tower` of what is beside it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.errors import SpecError
from fsdpplan.files.huggingface.config import LoadedModel, parse_hf_config
from tests.files.references import built_parameters
from tests.refusals import check_one_line

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "golden/huggingface_configs.jsonl")
    .read_text()
    .splitlines()
]
PLANNED = [row for row in ROWS if "refused" not in row]
REFUSED = [row for row in ROWS if "refused" in row]
COUNTED_OTHERWISE = {
    "longcat_flash": "transformers builds gates of the experts that do nothing, its publisher none",
    "ernie4_5_vl_moe": "its experts of images are not among those that the fields count first",
}
"""Mixtures of which the two numbers that are offered are further off."""


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def parse(config: dict[str, Any]) -> LoadedModel:
    return parse_hf_config(json.dumps(config), where="config.json", name="tiny")


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as refused:
        parse(config)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


def test_most_of_the_newest_families_are_planned() -> None:
    assert len(PLANNED) >= 60
    assert len({row["config"]["model_type"] for row in PLANNED}) >= 55


@pytest.mark.parametrize("row", PLANNED, ids=names(PLANNED))
def test_a_config_has_as_many_parameters_as_transformers_builds(row: dict[str, Any]) -> None:
    count = parameter_count(parse(row["config"]).model)
    assert count == pytest.approx(row["parameters"], rel=0.005)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_the_recorded_counts_are_those_of_the_installed_transformers(row: dict[str, Any]) -> None:
    text, tower = built_parameters(row["config"])
    assert (text, tower) == (row["parameters"], row.get("tower", 0))


@pytest.mark.parametrize("row", REFUSED, ids=names(REFUSED))
def test_a_family_that_is_not_planned_says_why_and_what_to_type(row: dict[str, Any]) -> None:
    """The two numbers are those of the fields: within an eighth of what transformers builds."""
    said = refusal(row["config"])
    assert f"not planned: {row['refused']}. Give its size" in said
    offered = re.search(r"--params ([\d.]+e\d+) --active-params ([\d.]+e\d+)", said)
    if "mixture" not in said:
        assert offered is None
        return
    assert offered is not None
    total, active = map(float, offered.groups())
    assert 0 < active < total
    if row["name"] not in COUNTED_OTHERWISE:
        assert total == pytest.approx(row["parameters"], rel=1 / 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_routed_experts", 256),
        ("num_experts", [64] * 24),
        ("moe_num_experts", [64, 64]),
        ("moe_intermediate_size", 512),
        ("moe_layer_freq", [0, 1, 1]),
        ("expert_capacity", 12),
    ],
)
def test_an_unknown_mixture_is_never_told_to_be_dense(key: str, value: object) -> None:
    inner = {"model_type": "new_text", "hidden_size": 64, key: value}
    for config in (inner, {"model_type": "new", "text_config": inner}):
        said = refusal(config)
        assert "mixture of experts" in said
        assert "--params TOTAL --active-params ACTIVE" in said
        assert "dense" not in said


STRANGE = [None, True, 0, -1, 10**18, 0.5, "x", [], [[]], [None], ["a"], [10**9], {}, {"a": 1}]
BY_OTHERS = ["indexer_types", "layer_types", "mlp_layer_types", "hybrid_layer_pattern"]
BY_OTHERS += ["linear_attn_config", "attn_layer_indices", "moe_topk", "moe_layer_freq"]


@given(st.sampled_from(ROWS), st.data())
def test_any_value_at_any_key_is_a_model_or_one_line(
    row: dict[str, Any], data: st.DataObject
) -> None:
    config = row["config"]
    inner = config.get("text_config", config)
    key = data.draw(st.sampled_from(sorted({*inner, *BY_OTHERS})))
    changed = inner | {key: data.draw(st.sampled_from(STRANGE))}
    try:
        model = parse(changed if inner is config else config | {"text_config": changed}).model
    except SpecError as refused:
        check_one_line(refused)
    else:
        assert parameter_count(model) > 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bailing_hybrid", {"layer_types": None, "layer_group_size": 10**18}),
        ("bamba-9b", {"num_hidden_layers": 10**18}),
        ("granite-4-h-micro", {"num_hidden_layers": 10**18}),
        ("mimo_v2_flash", {"num_hidden_layers": 10**18}),
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 10**18}),
    ],
)
def test_no_list_of_endless_layers_is_made(name: str, change: dict[str, Any]) -> None:
    row = next(row for row in PLANNED if row["name"] == name)
    assert "no model has more than 10000 layers" in refusal(row["config"] | change)


def test_the_text_model_of_a_wrapper_is_read_by_its_own_family() -> None:
    text = next(row for row in PLANNED if row["name"] == "kimi-k2.5")["config"]["text_config"]
    for key in ("text_config", "llm_config", "language_config"):
        read = parse({"model_type": "anything", key: text, "vision_config": {"depth": 2}})
        assert parameter_count(read.model) == 1_026_408_209_408  # of 1 T
        assert read.model.experts is not None
        assert read.notes[0].startswith("the vision tower is left out")
    nested = parse({"model_type": "omni", "thinker_config": {"text_config": text}})
    assert nested.model.experts is not None


def test_the_wrapper_says_whether_the_head_is_the_embedding() -> None:
    text = next(row for row in PLANNED if row["name"] == "seed_oss")["config"]
    tied = parse({"model_type": "new", "text_config": text, "tie_word_embeddings": True}).model
    assert tied.tied_embeddings
    assert not parse({"model_type": "new", "text_config": text}).model.tied_embeddings


@pytest.mark.parametrize("row", [r for r in ROWS if "tower" in r], ids=lambda row: row["name"])
def test_a_tower_is_named_with_about_its_size(row: dict[str, Any]) -> None:
    """What joins it to the text model, and patches, are not among its blocks."""
    if "refused" in row:
        return
    note = next(note for note in parse(row["config"]).notes if "tower" in note)
    found = re.search(r"about ([\d.]+) ([MB]) parameters", note)
    if row["config"]["vision_config"].get("model_type", "").startswith("glm4v"):
        assert found is None
    elif found is not None:
        count = float(found[1]) * {"M": 1e6, "B": 1e9}[found[2]]
        assert 0.7 * row["tower"] < count < 1.05 * row["tower"]
    else:
        assert "num_hidden_layers" not in row["config"]["vision_config"]


def test_ling_has_the_size_that_its_publisher_says() -> None:
    """inclusionAI/Ling-mini-2.0: 16 B parameters, 1.4 B of them active. Its code is its own."""
    ling = {
        "model_type": "bailing_moe",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 157184,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "score_function": "sigmoid",
        "use_qk_norm": True,
        "rope_theta": 600000,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
    }
    model = parse(ling).model
    assert parameter_count(model) / 1e9 == pytest.approx(16, rel=0.02)
    assert active_parameter_count(model) / 1e9 == pytest.approx(1.4, rel=0.03)
    assert model.experts is not None
    assert (model.experts.router.groups, model.experts.dense_layers) == (8, 1)


def test_constants_that_a_model_multiplies_by_are_said_to_be_left_out() -> None:
    row = next(row for row in PLANNED if row["name"] == "granite")["config"]
    assert parse(row).notes == ()  # all are 1
    read = parse(row | {"embedding_multiplier": 12, "logits_scaling": 16})
    assert read.notes[0].startswith("embedding_multiplier and logits_scaling left out")
    laguna = next(row for row in PLANNED if row["name"] == "laguna")["config"]
    assert not any("capped" in note for note in parse(laguna).notes)  # by 0
    capped = parse(laguna | {"moe_router_logit_softcapping": 30.0})
    assert any("moe_router_logit_softcapping 30.0 is left out" in note for note in capped.notes)


def test_windows_in_another_order_are_planned_as_many() -> None:
    """Which blocks see everything matters to no price; how many does."""
    row = next(row for row in PLANNED if row["name"] == "mimo-v2-flash")
    read = parse(row["config"])
    assert read.model.layers - read.model.windowed_blocks == 9
    assert any("in an order of its own" in note for note in read.notes)
    config = row["config"] | {"hybrid_layer_pattern": [0] * 48}
    assert parse(config).model.windowed_blocks == 0
