"""Predicted steps as trace-event JSON: the format's rules, and the estimate's sums."""

from __future__ import annotations

from collections import defaultdict

import pytest

from fsdpplan.cost.estimate import step_time
from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.run.trace.chrome import stage_rank, trace_document
from fsdpplan.run.trace.overlay import axis_groups
from fsdpplan.trainer.watch.trace import COLLECTIVES, communications
from tests.cost.problems import Case, case
from tests.run.trace.format_rules import problems

PIPELINE = {
    "pp": 2,
    "tp": 2,
    "sequence_parallel": True,
    "reshard_after_forward": "never",
    "gradient_sync": "last",
}
CASES = {
    "fsdp": case(dp_shard=8, num_microbatches=8, activation_checkpointing="full"),
    "hsdp": case(dp_shard=8, dp_replicate=2, gradient_sync="reduce_scatter_only"),
    "ddp": case(dp_replicate=4, sharding="ddp", num_microbatches=2),
    "tp": case(dp_shard=2, tp=4, sequence_parallel=True, async_tp=True, compile=True),
    "1f1b": case(dp_shard=2, num_microbatches=6, schedule="1f1b", **PIPELINE),
    "zbv": case(dp_shard=2, num_microbatches=6, schedule="zbv", virtual_stages=2, **PIPELINE),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_trace_keeps_the_rules_of_the_format(name: str) -> None:
    document = document_of(CASES[name])
    assert problems(document) == []


def document_of(one: Case, *, detailed: int = 2) -> dict[str, object]:
    timeline = step_timeline(one, detailed=detailed)
    groups = axis_groups(one, timeline.rank)
    return trace_document(timeline, one.layout, name="plan.trace.json", groups=groups)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_its_sums_are_those_of_the_estimate(name: str) -> None:
    one = CASES[name]
    timeline = step_timeline(one, detailed=1)
    groups = axis_groups(one, timeline.rank)
    document = trace_document(timeline, one.layout, name="x", groups=groups)
    step = step_time(one)
    pid = stage_rank(one.layout, timeline.rank)
    terms: dict[str, float] = defaultdict(float)
    spans = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
    for event in spans:
        terms[event["args"].get("term", "")] += event["dur"] * 1e-6
    time = step.time
    assert terms["compute"] == pytest.approx(time.compute_seconds)
    assert terms["exposed"] == pytest.approx(time.exposed_communication_seconds)
    assert terms["optimizer"] == pytest.approx(time.optimizer_seconds)
    assert terms.get("bubble", 0.0) == pytest.approx(time.bubble_seconds, abs=1e-12)
    (mark,) = (e for e in spans if e["name"] == "ProfilerStep#0")
    assert mark["dur"] == pytest.approx(time.total_seconds * 1e6)
    # what reads the traces of runs reads this one
    rows = communications(
        {"traceEvents": spans}, axis_of_group={axis: axis for axis in groups}, axes_of_gloo={}
    )
    expected: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for row in step.communication:
        expected[row.axis, row.collective][0] += row.seconds
        expected[row.axis, row.collective][1] += row.bytes
    assert {(row.axis, row.collective) for row in rows} == set(expected)
    for found in rows:
        seconds, size = expected[found.axis, found.collective]
        assert found.seconds == pytest.approx(seconds)
        assert found.bytes == pytest.approx(size, rel=1e-3)


def test_collectives_have_torchs_names_and_arguments() -> None:
    document = document_of(CASES["fsdp"])
    kernels = [e for e in document["traceEvents"] if "Collective name" in e.get("args", {})]  # type: ignore[attr-defined]
    for event in kernels:
        about = event["args"]
        assert event["name"].startswith("ncclDevKernel_")
        assert COLLECTIVES[about["Collective name"]]
        assert about["Group size"] == 8
        assert about["dtype"] in ("BFloat16", "Float")
        assert about["Process Group Description"] == "mesh_dp_shard"
    gathers = [e for e in kernels if e["args"]["Collective name"] == "_allgather_base"]
    assert gathers[0]["args"]["In msg nelems"] * 8 == gathers[0]["args"]["Out msg nelems"]
    assert any(e["args"]["for"] == "FSDP::all_gather (layers.0)" for e in gathers)


def test_stages_are_processes_by_the_first_rank_of_each() -> None:
    document = document_of(CASES["1f1b"])
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]  # type: ignore[attr-defined]
    assert {event["pid"] for event in spans} == {0, 4}
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]  # type: ignore[attr-defined]
    assert names == [
        "rank 0, pipeline stage 0 (predicted)",
        "rank 4, pipeline stage 1 (predicted)",
    ]
    arrows = [e for e in document["traceEvents"] if e["ph"] == "f"]  # type: ignore[attr-defined]
    assert len(arrows) == 2 * CASES["1f1b"].layout.num_microbatches


def test_the_validator_finds_what_is_broken() -> None:
    document = document_of(CASES["ddp"])
    events = document["traceEvents"]
    assert isinstance(events, list)
    kernels = [e for e in events if e["ph"] == "X" and e["cat"] == "kernel"]
    kernels[1]["ts"] = kernels[0]["ts"] + kernels[0]["dur"] / 2
    kernels[1]["dur"] = kernels[0]["dur"]
    del kernels[3]["dur"]
    events[:] = [e for e in events if e["name"] != "thread_name"]
    said = " ".join(problems(document))
    assert "ends behind" in said
    assert "lacks {'dur'}" in said
    assert "no name for row" in said
