"""Reading the plan: strict, and one line a mistake."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.trainer.config import (
    NOT_FOR_THE_TRAINER,
    LayoutConfig,
    ModelConfig,
    TrainingConfig,
    load_plan,
    parse_plan,
)
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.support import require_runnable
from tests.trainer import plans

Change = Callable[[dict[str, Any]], object]

EXPERTS = {"experts": 5, "active": 2, "hidden": 15, "shared_hidden": 7}
LATENT = {"kv_rank": 8, "rope_head_dim": 3, "value_head_dim": 8}


@pytest.mark.parametrize(
    ("read", "written"),
    [(ModelConfig, Model), (LayoutConfig, Layout), (TrainingConfig, Training)],
)
def test_the_trainer_reads_the_fields_that_a_plan_has(read: type, written: type) -> None:
    names = {field.name for field in dataclasses.fields(read)}
    unread = NOT_FOR_THE_TRAINER.get(read) or frozenset()
    assert names | unread == {field.name for field in dataclasses.fields(written)}


def test_a_plan_comes_from_text_file_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = plans.plan_text(dp_shard=2)
    path = tmp_path / "fsdpplan.json"
    path.write_text(text, encoding="utf-8")
    expected = parse_plan(text)
    assert expected.layout.dp_shard == 2
    assert load_plan(text) == expected
    assert load_plan(path) == expected
    monkeypatch.setenv("FSDPPLAN_PLAN", text)
    assert load_plan() == expected
    monkeypatch.setenv("FSDPPLAN_PLAN", str(path))
    assert load_plan() == expected


def setting(*path: str, to: object) -> Change:
    def change(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("schema_version"), "schema_version is None"),
        (setting("schema_version", to=99), "schema_version is 99"),
        (lambda d: d.pop("model"), "no model"),
        (lambda d: d["layout"].pop("dp_shard"), "no layout.dp_shard"),
        (setting("layout", "zero_bubble", to=True), "'zero_bubble'"),
        (setting("training", "accumulate", to=2), "'accumulate'"),
        (setting("layout", to=[]), "layout must be an object"),
        (setting("layout", "dp_shard", to="4"), "layout.dp_shard must be a whole number"),
        (setting("layout", "dp_shard", to=True), "layout.dp_shard must be a whole number"),
        (setting("layout", "dp_shard", to=2.0), "layout.dp_shard must be a whole number"),
        (setting("layout", "dp_shard", to=0), "layout.dp_shard must be at least 1"),
        (setting("layout", "compile", to=1), "layout.compile must be true or false"),
        (setting("layout", "reshard_after_forward", to=None), "reshard_after_forward cannot be"),
        (setting("model", "rope_theta", to=float("nan")), "model.rope_theta must be a finite"),
        (setting("model", "rope_theta", to="big"), "model.rope_theta must be a number"),
        (setting("cluster", "gpus", to=3), "1 ranks but its cluster 3 GPUs"),
        (setting("training", "global_batch", to=9), "takes 8 sequences"),
    ],
)
def test_a_plan_edited_into_nonsense_names_the_field(change: Change, words: str) -> None:
    document = plans.plan_document()
    change(document)
    with pytest.raises(TrainerError) as raised:
        parse_plan(json.dumps(document))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["{", '{"a": }', "{" + '"a":[' * 100_000])
def test_what_is_not_json_is_said(text: str) -> None:
    with pytest.raises(TrainerError, match="not JSON"):
        load_plan(text)


def test_a_missing_file_is_said() -> None:
    with pytest.raises(TrainerError, match="cannot be read"):
        load_plan("/nowhere/fsdpplan.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tp": 2}, "tp 2 without sequence_parallel"),
        ({"pp": 2, "schedule": "1f1b"}, "schedule 1f1b with 1 micro-batches"),
        ({"cp": 5}, "cp 5 with sequences of 24"),
        ({"ep": 2, "dp_shard": 2}, "ep 2 with a dense model"),
        ({"ep": 2, "dp_shard": 2, "model": {"experts": EXPERTS}}, "ep 2 with experts of 5"),
        ({"ep": 5, "dp_shard": 2, "model": {"experts": EXPERTS}}, "ep 5 with dp_shard x cp of 2"),
        (
            {"ep": 5, "dp_shard": 10, "micro_batch": 1, "model": {"experts": EXPERTS}}
            | {"reshard_after_forward": 2},
            "reshard_after_forward 2 with ep 5",
        ),
        ({"tp": 2, "dp_shard": 4, "reshard_after_forward": 2}, "reshard_after_forward 2 with tp 2"),
        ({"tp": 2, "model": {"experts": EXPERTS}}, "tp 2 with expert hidden of 15"),
        ({"tp": 2, "model": {"experts": EXPERTS}}, "tp 2 with shared experts hidden of 7"),
        ({"sharding": "zero1"}, "sharding zero1"),
        ({"sharding": "zero2"}, "sharding zero2"),
        ({"sharding": "ddp", "gradient_sync": "reduce_scatter_only"}, "reduce_scatter_only"),
        ({"sharding": "ddp", "dp_shard": 2}, "use dp_replicate"),
        ({"dp_shard": 4, "reshard_after_forward": 3}, "reshard_after_forward 3"),
        ({"reshard_after_forward": "sometimes"}, "reshard_after_forward sometimes"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing some"),
        ({"checkpoint_blocks": "some"}, "checkpoint_blocks some"),
        ({"checkpoint_blocks": 2}, "checkpoint_blocks 2 without activation_checkpointing"),
        ({"gradient_sync": "never"}, "gradient_sync never"),
        ({"offload": "disk"}, "offload disk"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"loss_parallel": True}, "loss_parallel"),
        ({"async_tp": True}, "async_tp"),
        ({"training": {"precision": "fp4"}}, "precision fp4"),
        ({"training": {"optimizer": "lion"}}, "optimizer lion"),
        ({"training": {"runtime": "megatron"}}, "runtime megatron"),
        ({"model": {"mlp": "relu"}}, "model.mlp relu"),
        ({"model": {"norm": "batchnorm"}}, "model.norm batchnorm"),
        ({"model": {"positions": "sine"}}, "model.positions sine"),
        ({"model": {"qk_norm_width": "half"}}, "model.qk_norm_width half"),
        ({"model": {"head_dim": 7}}, "odd head_dim 7"),
        ({"model": {"latent": LATENT}}, "odd rope_head_dim 3"),
        ({"model": {"positions": "learned", "max_positions": 8}}, "8 learned positions"),
        ({"model": {"kv_heads": 3}}, "3 key/value heads"),
    ],
)
def test_what_the_trainer_cannot_run_is_refused_in_words(
    arguments: dict[str, Any], words: str
) -> None:
    plan = parse_plan(plans.plan_text(**arguments))
    with pytest.raises(TrainerError, match="cannot run") as raised:
        require_runnable(plan)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("layer", "window"), [(0, 7), (1, 7), (2, 0), (3, 7)], ids=["1st", "2nd", "3rd", "4th"]
)
def test_each_third_block_sees_everything(layer: int, window: int) -> None:
    config = plans.config_of(sliding_window=7, full_attention_every=3)
    assert config.window(layer) == window


def test_the_first_blocks_of_a_mixture_may_be_dense() -> None:
    config = plans.config_of(experts=EXPERTS | {"dense_layers": 2})
    assert [config.has_experts(layer) for layer in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_the_trainer_can_run_is_not_refused(kind: str) -> None:
    document = plans.plan_document(dp_replicate=2, dp_shard=4, reshard_after_forward=2)
    document["cluster"]["device"]["kind"] = kind
    require_runnable(parse_plan(json.dumps(document)))
