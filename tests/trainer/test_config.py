"""Reading the plan: strict, and one line a mistake."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.files.plans import THEN
from fsdpplan.spec.cluster import Cluster, Device, Level
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Experts, LatentAttention, Model, Router
from fsdpplan.spec.nodes import Network
from fsdpplan.spec.torch_features import TorchNeed
from fsdpplan.spec.training import Training
from fsdpplan.trainer.config import (
    NOT_FOR_THE_TRAINER,
    ClusterConfig,
    DeviceConfig,
    ExpertsConfig,
    LatentConfig,
    LayoutConfig,
    LevelConfig,
    ModelConfig,
    NetworkConfig,
    RouterConfig,
    TorchNeededConfig,
    TrainingConfig,
    load_plan,
    parse_plan,
)
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.mesh import MESH_AXES, Place
from fsdpplan.trainer.parallel.support import require_runnable
from tests.trainer import plans

PACKAGE = Path(__file__).resolve().parents[2] / "fsdpplan"

Change = Callable[[dict[str, Any]], object]

EXPERTS = {"experts": 5, "active": 2, "hidden": 15, "shared_hidden": 7}
LATENT = {"kv_rank": 8, "rope_head_dim": 3, "value_head_dim": 8}


WHOLE: list[tuple[type, type]] = [
    (ModelConfig, Model),
    (ExpertsConfig, Experts),
    (RouterConfig, Router),
    (LatentConfig, LatentAttention),
    (LayoutConfig, Layout),
    (TrainingConfig, Training),
]
"""What the trainer reads whole, and what it is a copy of: it imports nothing of the planner's."""

IN_PART: list[tuple[type, type]] = [
    (ClusterConfig, Cluster),
    (DeviceConfig, Device),
    (LevelConfig, Level),
    (NetworkConfig, Network),
    (TorchNeededConfig, TorchNeed),
]
"""What it reads as far as it needs it."""

UNREAD = {
    TrainingConfig: {
        "headroom_fraction": "what a plan must leave free is the planner's to see to",
        "fits_fraction": "so is how likely it is to fit",
        "program": "which of the two entries was called says it",
    }
}
"""Fields that the trainer has no use for, and why."""

MAY_BE_MISSING = {
    (DeviceConfig, "peak_fp16_flops_per_second"): "asked for with precision fp16 only",
    (DeviceConfig, "peak_fp8_flops_per_second"): "asked for with precision fp8 only",
    (DeviceConfig, "memory_bytes"): "for words after memory has run out",
    (DeviceConfig, "multiprocessors"): "for the preflight, which goes without",
    (DeviceConfig, "host_link_bytes_per_second"): "for the preflight, which goes without",
    (ClusterConfig, "levels"): "for the preflight, which goes without",
    (ClusterConfig, "network"): "for the preflight, which goes without",
    (TorchNeededConfig, "because"): "words",
}
"""Fields without which the trainer does, though every plan has them, and why."""


def defaults(of: type) -> dict[str, Any]:
    """Field -> its default as JSON has it, of those that have one."""
    found = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(of)
    }
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in found.items()
        if value is not MISSING
    }


def names(of: type) -> set[str]:
    return {field.name for field in fields(of)}


@pytest.mark.parametrize(("read", "written"), WHOLE)
def test_the_trainer_reads_the_fields_that_a_plan_has(read: type, written: type) -> None:
    unread = set(UNREAD.get(read, {}))
    assert unread == (NOT_FOR_THE_TRAINER.get(read) or set())
    assert names(read) | unread == names(written)
    assert not names(read) & unread


@pytest.mark.parametrize(("read", "written"), IN_PART)
def test_of_other_parts_it_reads_nothing_that_a_plan_has_not(read: type, written: type) -> None:
    assert names(read) <= names(written)


@pytest.mark.parametrize(("read", "written"), WHOLE + IN_PART)
def test_a_field_that_is_left_out_means_the_same_to_the_trainer(read: type, written: type) -> None:
    meant = defaults(written)
    for name, value in defaults(read).items():
        if (read, name) not in MAY_BE_MISSING:
            assert value == meant[name], name


@pytest.mark.parametrize(("read", "written"), WHOLE)
def test_what_the_trainer_must_be_told_stood_in_the_first_plans(read: type, written: type) -> None:
    """So a field that comes later gets a default here too, and old plans stay readable."""
    told = names(read) - set(defaults(read))
    always = names(written) - set(defaults(written))
    assert told <= always | set(THEN.get(written, "").split())


def test_a_rank_has_a_place_on_each_axis() -> None:
    assert names(Place) == set(MESH_AXES)


def test_the_axes_are_spelled_once() -> None:
    spelled = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and {each.value for each in node.elts if isinstance(each, ast.Constant)} >= set(MESH_AXES)
    ]
    assert spelled == ["spec/conventions.py"]


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
