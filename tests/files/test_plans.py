"""Plans on disk: the same plan comes back, and an edited one is refused with the field's name."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.plans import (
    LIMIT_BYTES,
    carried_json,
    carried_like,
    estimate_document,
    layout_document,
    plan_document,
    plan_from_json,
    plan_json,
    read_plan,
    write_plan,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Experts, LatentAttention, Model
from fsdpplan.spec.plan import (
    CollectiveCost,
    Estimate,
    Interval,
    MemoryBreakdown,
    Plan,
    RankedLayout,
    TimeBreakdown,
)
from fsdpplan.spec.training import OLDEST, Training
from tests.refusals import check_one_line
from tests.strategies import plans

TRAINING = Training(seq_len=1024, global_batch=64)
ESTIMATE = Estimate(
    step_seconds=Interval(lower=0.75, expected=1.0, upper=1.5),
    tokens_per_second=65536.0,
    tokens_per_second_per_gpu=4096.0,
    mfu_fraction=0.4,
    hfu_fraction=0.5,
    bottleneck="compute",
    runnable=True,
    time=TimeBreakdown(
        compute_seconds=0.75,
        exposed_communication_seconds=0.125,
        bubble_seconds=0.0,
        optimizer_seconds=0.125,
    ),
    memory=MemoryBreakdown(
        parameters_bytes=1000,
        gradients_bytes=1000,
        optimizer_bytes=2000,
        unsharded_parameters_bytes=300,
        unsharded_gradients_bytes=0,
        activations_bytes=5000,
        logits_bytes=700,
        temporaries_bytes=0,
        reserved_overhead_bytes=500,
        context_bytes=100,
        peak_phase="loss",
    ),
    communication=(
        CollectiveCost(
            collective="all_gather",
            axis="dp_shard",
            ranks=8,
            level="nvlink",
            dtype="bf16",
            count=9,
            bytes=4000,
            seconds=0.2,
            exposed_seconds=0.1,
        ),
    ),
)
LAYOUT = Layout(dp_replicate=2, dp_shard=8, micro_batch=2, num_microbatches=2)
PLAN = Plan(
    model=Model(
        name="tiny", layers=4, hidden=256, ffn_hidden=704, heads=4, kv_heads=2, head_dim=64,
        vocab=1000,
    ),
    cluster=load_cluster("dgx-h100", gpus=16).cluster,
    training=TRAINING,
    layout=LAYOUT,
    estimate=ESTIMATE,
    alternatives=(RankedLayout(rank=1, layout=LAYOUT, estimate=ESTIMATE, reason="fastest"),),
    sources=(("model", "flag"), ("cluster", "profile dgx-h100")),
    assumptions=("sequence 1024",),
    warnings=(),
    versions=(("fsdpplan", "0.1.0"),),
)  # fmt: skip

# The names of the JSON that others rely on: never rename one.
LAYOUT_NAMES = {
    "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "sharding", "reshard_after_forward",
    "gradient_sync", "wrap_blocks", "micro_batch", "num_microbatches", "schedule",
    "virtual_stages", "activation_checkpointing", "sequence_parallel", "loss_parallel",
    "async_tp", "offload", "compile",
}  # fmt: skip
ESTIMATE_NAMES = {
    "step_seconds", "tokens_per_second", "tokens_per_second_per_gpu", "mfu_fraction",
    "hfu_fraction", "bottleneck", "runnable", "time", "memory", "communication",
}  # fmt: skip
COLLECTIVE_NAMES = {
    "collective", "axis", "ranks", "level", "dtype", "count", "bytes", "seconds",
    "exposed_seconds",
}  # fmt: skip


def edited(path: str, value: Any) -> str:
    """The plan's text with one field changed; `...` removes it."""
    document = plan_document(PLAN)
    *steps, last = path.split(".")
    here: Any = document
    for step in steps:
        here = here[int(step)] if isinstance(here, list | tuple) else here[step]
    if value is ...:
        del here[last]
    else:
        here[last] = value
    return json.dumps(document)


NEW_FIELDS = replace(
    PLAN,
    model=replace(
        PLAN.model,
        experts=Experts(experts=8, active=2, hidden=64, shared_hidden=32, dense_layers=1),
        latent=LatentAttention(kv_rank=32, rope_head_dim=16, value_head_dim=32),
        sliding_window=128,
    ),
    training=replace(TRAINING, precision="fp8", fp8_all_gather=True, fp8_recipe="delayed"),
    layout=replace(LAYOUT, ep=2, offload="cpu", wrap_blocks=2),
    alternatives=(),
)


def test_the_fields_of_today_come_back() -> None:
    again = plan_from_json(plan_json(NEW_FIELDS), where="plan")
    assert again == NEW_FIELDS
    staged = replace(
        NEW_FIELDS,
        layout=replace(
            LAYOUT,
            dp_replicate=1,
            pp=2,
            num_microbatches=4,
            schedule="1f1b",
            stage_blocks=(3, 1),
        ),
    )
    assert plan_from_json(plan_json(staged), where="plan").layout.stage_blocks == (3, 1)


@given(plans())
def test_a_plan_comes_back_from_its_text_and_writes_the_same_text(plan: Plan) -> None:
    text = plan_json(plan)
    again = plan_from_json(text, where="plan")
    assert again == plan
    assert plan_json(again) == text
    assert text.isascii()
    carried = carried_json(plan)
    assert plan_from_json(carried, where="plan") == plan
    assert carried.isascii()


def test_a_job_carries_a_line_for_each_part_of_its_plan(tmp_path: Path) -> None:
    carried = carried_json(PLAN)
    lines = carried.splitlines()
    assert [json.loads(f"{{{line.rstrip(',')}}}") for line in lines[1:-1]] == [
        {name: part} for name, part in json.loads(plan_json(PLAN)).items()
    ]

    write_plan(PLAN, tmp_path / "plan.json")
    assert carried_like(PLAN, tmp_path / "plan.json") == carried


def test_what_a_plan_needs_of_torch_is_written_for_the_trainer_and_derived_again() -> None:
    document = plan_document(PLAN)
    assert document["torch_needed"] == {"oldest": str(OLDEST), "because": ""}
    other = json.dumps({**document, "torch_needed": {"oldest": "9.9", "because": "x"}})
    assert plan_from_json(other, where="plan") == PLAN


@pytest.mark.parametrize("torch", ["2", "2.9.1", "next"])
def test_a_release_that_is_none_is_refused(torch: str) -> None:
    with pytest.raises(SpecError, match="torch"):
        plan_from_json(edited("training.torch", torch), where="plan")


def test_the_documents_hold_the_names_that_others_rely_on() -> None:
    assert set(layout_document(LAYOUT)) >= LAYOUT_NAMES
    document = estimate_document(ESTIMATE)
    assert set(document) >= ESTIMATE_NAMES
    assert document["time"]["total_seconds"] == 1.0
    assert document["memory"]["peak_allocated_bytes"] == 10_000
    assert document["memory"]["peak_reserved_bytes"] == 10_500
    assert document["memory"]["peak_device_bytes"] == 10_600
    assert set(document["step_seconds"]) == {"lower", "expected", "upper"}
    assert set(document["communication"][0]) >= COLLECTIVE_NAMES


def test_a_plan_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "fsdpplan.json"
    path.write_text("old")
    write_plan(PLAN, path)
    assert read_plan(path) == PLAN
    assert os.listdir(tmp_path) == ["fsdpplan.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("name", ["none/plan.json", "folder", "x" * 300, "a\0b"])
def test_an_unwritable_place_is_one_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecError, match="cannot be written") as refusal:
        write_plan(PLAN, tmp_path / name)
    assert len(str(refusal.value).splitlines()) == 1
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("layout.micro_batch", 0, "layout: micro_batch must be a whole number of at least 1"),
        ("layout.micro_batch", -2, "layout: micro_batch"),
        ("layout.micro_batch", 2.0, "layout.micro_batch must be a valid integer"),
        ("layout.micro_batch", True, "layout.micro_batch must be a valid integer"),
        ("layout.micro_batch", "2", "layout.micro_batch must be a valid integer"),
        ("layout.micro_batch", None, "layout.micro_batch must be a valid integer"),
        ("layout.micro_batch", 10**40, "layout.micro_batch is beyond 2**63"),
        ("layout.micro_batch", 4, "the layout takes 128 sequences a step, the training 64"),
        ("layout.dp_shard", 3, "the layout has 6 ranks, the cluster 16 GPUs"),
        ("layout.tp", ..., "layout.tp is missing"),
        ("layout.tpp", 2, "unknown key layout.tpp"),
        ("layout.compile", 1, "layout.compile must be a valid boolean"),
        ("layout.compile", False, "layout and estimate are not together"),
        ("layout.sharding", "zero9", "layout.sharding"),
        ("layout.reshard_after_forward", "sometimes", "'always' or 'never' or a valid integer"),
        ("layout.reshard_after_forward", 1, "reshard_after_forward must be always, never"),
        ("layout.schedule", "1f1b", "schedule 1f1b does not go with pp 1"),
        ("model.layers", 0, "model: layers must be a whole number"),
        ("model.heads", 3, "model: kv_heads must divide heads"),
        ("model.layers", 10**12, "model: no model has more than"),
        ("model", [], "model"),
        ("model", ..., "model is missing"),
        ("model.rope_theta", "big", "model.rope_theta must be a valid number"),
        ("cluster.gpus", 24, "cluster: the outermost level joins 16 GPUs, but 24"),
        ("cluster.nodes", 3, "cluster.nodes is 3, but the rest makes it 2"),
        ("cluster.device.kind", "tpu", "cluster.device.kind"),
        ("cluster.levels", [], "cluster: a cluster needs at least one level"),
        ("cluster.levels.0.ports", "1", "cluster.levels.0.ports must be a valid integer"),
        ("training.seq_len", 0, "training: seq_len must be a whole number"),
        ("training.seq_len", 2048, "estimate.tokens_per_second comes to 65536"),
        ("training.global_batch", 65, "64 sequences a step, the training 65"),
        ("training.precision", "int4", "training.precision"),
        ("estimate.mfu_fraction", 1.5, "estimate.mfu_fraction must be at most 1"),
        ("estimate.mfu_fraction", -0.1, "estimate.mfu_fraction cannot be negative"),
        ("estimate.step_seconds.expected", 2.0, "lower <= expected <= upper"),
        ("estimate.step_seconds.lower", 0.0, "lower <= expected <= upper"),
        ("estimate.time.compute_seconds", 0.5, "estimate.time comes to 0.75"),
        ("estimate.time.total_seconds", 3.0, "estimate.time.total_seconds is 3.0, but the rest"),
        ("estimate.memory.parameters_bytes", -1, "parameters_bytes cannot be negative"),
        ("estimate.memory.parameters_bytes", 7, "not together in any line of alternatives"),
        ("estimate.memory.peak_allocated_bytes", 5, "peak_allocated_bytes is 5, but the rest"),
        ("estimate.tokens_per_second_per_gpu", 1.0, "tokens_per_second_per_gpu comes to 1"),
        ("estimate.communication.0.count", -9, "communication.0.count cannot be negative"),
        ("alternatives.0.rank", 7, "alternatives.0.rank is 7, but it stands at place 1"),
        ("alternatives.0.layout.dp_shard", 4, "alternatives.0.layout has 8 ranks"),
        ("alternatives", {}, "alternatives"),
        ("sources.model", 7, "sources.model must be a valid string"),
        ("sources", [["model", "flag"]], "sources"),
        ("warnings", "none", "warnings"),
        ("schema_version", 2, "schema_version is 2, and this fsdpplan reads 1"),
        ("schema_version", ..., "schema_version is None"),
        ("surprise", {"a": 1}, "unknown key surprise"),
    ],
)  # fmt: skip
def test_an_edited_plan_is_one_line_with_the_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        plan_from_json(edited(path, value), where="fsdpplan.json")
    assert str(refusal.value).startswith("fsdpplan.json: ")
    assert message in str(refusal.value)
    assert "fsdpplan recommend" in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("null", "must hold one JSON object, not null"),
        ("{}", "schema_version is None"),
        ('{"schema_version": 1}', "model is missing"),
        ('{"schema_version": 1, "model": NaN}', "NaN is not a number"),
        ('{"schema_version": 1, "model": 1e999}', "model is beyond the range of a number"),
        ('{"schema_version": 1, "model": ' + "[" * 100_000, "cannot be read as JSON"),
        ('{"schema_version": 1, "schema_version": 1}', "stands twice"),
        (" " * (LIMIT_BYTES + 1), "larger than 8 MiB"),
    ],
)
def test_hostile_text_is_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        plan_from_json(text, where="plan.json")
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_a_file_that_is_no_plan_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(SpecError, match="is not a file"):
        read_plan(tmp_path)
    (tmp_path / "huge.json").write_bytes(b" " * (LIMIT_BYTES + 1))
    with pytest.raises(SpecError, match="larger than 8192 KiB"):
        read_plan(tmp_path / "huge.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(SpecError, match="is not text"):
        read_plan(tmp_path / "binary.json")


@given(st.data())
def test_a_cut_plan_is_always_refused(data: st.DataObject) -> None:
    text = plan_json(PLAN).rstrip()
    with pytest.raises(SpecError):
        plan_from_json(text[: data.draw(st.integers(0, len(text) - 1))], where="plan.json")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


def leaves(value: Any, path: str = "") -> list[str]:
    """Paths of all values in a document."""
    pairs = enumerate(value) if isinstance(value, list | tuple) else value.items()
    here = [(f"{path}.{key}".lstrip("."), item) for key, item in pairs]
    return [p for p, _ in here] + [
        deep
        for p, item in here
        if isinstance(item, dict | list | tuple)
        for deep in leaves(item, p)
    ]


@given(st.data())
def test_any_value_anywhere_is_a_plan_or_one_line(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([p for p in leaves(plan_document(PLAN)) if "." in p]))
    if path.rsplit(".", 1)[1].isdigit():
        path = path.rsplit(".", 1)[0]
    text = edited(path, data.draw(scalars))
    try:
        plan = plan_from_json(text, where="plan.json")
    except SpecError as refusal:
        check_one_line(refusal)
    else:
        assert plan_from_json(plan_json(plan), where="plan.json") == plan
