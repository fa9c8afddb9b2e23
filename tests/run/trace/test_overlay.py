"""Overlays: what differs between a prediction and a trace is found, and the input that explains it.

Traces of CUDA devices are written by `cuda_trace`, with the names of real kernels; those of CPUs
are made by torch's profiler.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.errors import SpecError
from fsdpplan.files.traces import read_trace, write_trace
from fsdpplan.run.trace.chrome import trace_document
from fsdpplan.run.trace.measured import measured_step
from fsdpplan.run.trace.overlay import (
    ALL_MICROBATCHES,
    EXPOSED,
    IDLE,
    Overlay,
    axis_groups,
    compared,
    overlaid,
    overlay_document,
)
from fsdpplan.search.advice.sensitivity import rates_and_constants, with_value
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from tests.cost.problems import SMALL, case
from tests.run.trace.format_rules import problems
from tests.trainer import jobs

SHARDED = case(dp_shard=16, num_microbatches=2, micro_batch=4, activation_checkpointing="full")
PIPELINE = case(
    pp=2,
    dp_shard=8,
    num_microbatches=4,
    micro_batch=4,
    schedule="1f1b",
    reshard_after_forward="never",
    gradient_sync="last",
)
HOSTED = case(dp_shard=2, seq_len=128)
"""Its host is too slow for its kernels."""


def predicted_trace(of: Case) -> dict[str, Any]:
    timeline = step_timeline(of, detailed=ALL_MICROBATCHES)
    groups = axis_groups(of, timeline.rank)
    return trace_document(timeline, of.layout, name="x", groups=groups)


@pytest.mark.parametrize("of", [SHARDED, PIPELINE, HOSTED], ids=["fsdp", "pp", "host"])
def test_a_plan_does_not_differ_from_its_own_trace(of: Case) -> None:
    found = overlaid(of, predicted_trace(of))
    assert max(abs(one.seconds) for one in found.differences) <= 1e-9 * found.predicted.seconds
    assert found.explanations == ()


INPUTS = {
    "cluster.device.memory_bandwidth_bytes_per_second": SHARDED,
    "cluster.device.peak_bf16_flops_per_second": SHARDED,
    "cluster.device.fit.matmul_fraction": SHARDED,
    "cluster.device.fit.attention_forward_fraction": SHARDED,
    "cluster.device.fit.straggler_fraction": SHARDED,
    "cluster.device.fit.kernel_launch_seconds": HOSTED,
    "cluster.levels.nvlink.port_bandwidth_bytes_per_second": SHARDED,
    "cluster.levels.infiniband.latency_seconds": SHARDED,
    "cluster.levels.infiniband.port_bandwidth_bytes_per_second": PIPELINE,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("field", INPUTS)
def test_the_input_that_was_changed_explains_best(field: str) -> None:
    of = INPUTS[field]
    value = dict(rates_and_constants(of))[field]
    factor = 1.4 if field.endswith("launch_seconds") else 0.6
    found = overlaid(of, predicted_trace(with_value(of, field, factor * value)))
    best = found.explanations[0]
    assert field in (best.field, *best.also)
    assert best.left_fraction < 0.3
    if field == best.field:
        assert best.explaining_value == pytest.approx(factor * value, rel=0.05)


def cuda_trace(of: Case, change: Callable[[dict[str, Any]], float] = lambda event: 1.0) -> Any:
    """A step as a profile of a CUDA device has it: kernels by their library's names, launched by a
    host that is ahead of them, behind a step of warm-up; each kernel `change` times as long, and
    all behind it later."""
    names = {
        "matmul": "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "attention": "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>",
        "elementwise": "void at::native::vectorized_elementwise_kernel<4, ...>",
        "gradients": "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>",
        "copy": "void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous",
        "optimizer": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>",
    }
    document = predicted_trace(of)
    kernels = sorted(
        (e for e in document["traceEvents"] if e.get("cat") == "kernel"), key=lambda e: e["ts"]
    )
    events: list[dict[str, Any]] = []
    later = 0.0
    for number, event in enumerate(kernels):
        kind = event["args"]["kind"]
        grown = event["dur"] * (change(event) - 1)
        about = {k: v for k, v in event["args"].items() if k[0].isupper() or k == "dtype"}
        name = names.get(kind, event["name"])
        begin = 1e6 + event["ts"] + later
        later += grown
        events.append(
            {
                **event,
                "name": name,
                "pid": 0,
                "ts": begin,
                "dur": event["dur"] + grown,
                "args": {**about, "device": 0, "correlation": number},
            }
        )
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 77}
        launch |= {"tid": 77, "ts": 10.0 + 1e-3 * number, "dur": 1e-4}
        events.append({**launch, "args": {"correlation": number}})
    early = {"ph": "X", "cat": "kernel", "name": "warm_up", "pid": 0, "tid": 7, "ts": 1.0}
    events.append({**early, "dur": 2.0, "args": {"correlation": -1}})
    for number, (ts, dur) in enumerate(((0.0, 5.0), (5.0, 1e3), (1e3 + 5.0, 2e6))):
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}"}
        events.append({**mark, "pid": 77, "tid": 77, "ts": ts, "dur": dur, "args": {}})
    return {"distributedInfo": document["distributedInfo"], "traceEvents": events}


TINY = case(replace(SMALL, layers=1), dp_shard=2)


def host_trace() -> dict[str, Any]:
    """A step as a profile of CPUs has it."""
    span = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1.0, "dur": 9.0, "args": {}}
    mark = {"cat": "user_annotation", "name": "Optimizer.step#AdamW.step", "ts": 20.0}
    gloo = {"name": "gloo:_allgather_base", "tid": 5, "ts": 3.0, "dur": 4.0}
    named = [{"name": "aten::mm"}, {"name": "c10d::_allgather_base_", "ts": 2.0, "dur": 1.0}]
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}]
    return {
        "distributedInfo": {"rank": 0, "world_size": 2, "pg_config": groups},
        "traceEvents": [{**span, **each} for each in (*named, gloo, mark)],
    }


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
PLACES = (
    *((name,) for name in ("ph", "name", "cat", "pid", "tid", "ts", "dur", "args")),
    *(("args", name) for name in ("correlation", "Collective name", "Group size", "dtype")),
    *(("args", name) for name in ("Process Group Name", "Process Group Description")),
)
ABOUT = ((), ("rank",), ("world_size",), *(("pg_config", 0, "ranks")[:to] for to in (1, 2, 3)))


@given(
    is_host=st.booleans(),
    at=st.integers(0, 99),
    place=st.sampled_from([*(("traceEvents", *one) for one in PLACES), *ABOUT]),
    junk=JUNK,
)
def test_a_trace_with_anything_anywhere_is_read_or_refused_in_words(
    is_host: bool, at: int, place: tuple[Any, ...], junk: object
) -> None:
    trace = host_trace() if is_host else json.loads(tiny_trace())
    inside: Any = trace
    way: tuple[Any, ...] = ("distributedInfo", *place)
    if place[:1] == ("traceEvents",):
        way = ("traceEvents", at % len(trace["traceEvents"]), *place[1:])
    for step in way[:-1]:
        inside = inside[step]
    inside[way[-1]] = junk
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps(trace))
        try:
            found = compared(TINY, read := read_trace(path))
            write_trace(path, overlay_document(found, TINY, read))
        except SpecError:
            return
        assert found.measured.seconds >= 0


@cache
def tiny_trace() -> str:
    return json.dumps(cuda_trace(TINY))


def test_kernels_of_a_cuda_device_are_known_by_their_names() -> None:
    found = compared(SHARDED, cuda_trace(SHARDED))
    assert "ProfilerStep#1, the median of 3" in found.measured.chosen
    for one in found.differences:
        assert abs(one.seconds) <= 0.01 * found.predicted.seconds, one
        assert one.predicted_calls == one.measured_calls


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["matmul", "attention", "copy", "optimizer"])
def test_kernels_that_were_slowed_are_the_largest_difference(kind: str) -> None:
    def change(event: dict[str, Any]) -> float:
        return 3.0 if event["args"]["kind"] == kind else 1.0

    found = compared(SHARDED, cuda_trace(SHARDED, change))
    assert found.differences[0].name == kind
    assert found.differences[0].measured_seconds == pytest.approx(
        3 * found.differences[0].predicted_seconds
    )


def test_one_slow_call_among_many_is_named() -> None:
    def change(event: dict[str, Any]) -> float:
        about = event["args"]
        is_one = about.get("for") == "FSDP::post_backward_reduce (layers.3)"
        return 30.0 if is_one and about["micro_batch"] == 1 else 1.0

    found = compared(SHARDED, cuda_trace(SHARDED, change))
    (slow,) = (one for one in found.differences if one.name == "reduce_scatter over dp_shard")
    assert slow.seconds > 0
    assert "FSDP::post_backward_reduce (layers.3)" in slow.slowest


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two gloo ranks, by what was slowed."""
    folder = tmp_path_factory.mktemp("traces")
    finished = jobs.forked(2, "tests.run.trace.slowed:traces", folder)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return folder


GLOO = case(
    Model(
        name="two linear layers a block",
        layers=4,
        hidden=64,
        ffn_hidden=128,
        heads=1,
        kv_heads=1,
        head_dim=64,
        vocab=64,
        mlp="gelu",
    ),
    profile="cpu",
    seq_len=32,
    precision="fp32",
    dp_shard=2,
)
TOPS = {
    "all_gather": {EXPOSED, "all_gather over dp_shard"},
    "reduce_scatter": {EXPOSED, "reduce_scatter over dp_shard"},
    "matmul": {"matmul"},
    "idle": {IDLE},
}


@pytest.mark.gloo
@pytest.mark.parametrize("slowed", TOPS)
def test_what_was_slowed_in_a_run_is_the_largest_difference(traces: Path, slowed: str) -> None:
    trace = read_trace(traces / f"{slowed}.json")
    found = compared(GLOO, trace)
    tops = TOPS[slowed]
    assert {one.name for one in found.differences[: len(tops)]} == tops
    adds_up(found)


def adds_up(found: Overlay) -> None:
    """Differences of what is computed, exposed and idle are that of the step."""
    sums = sum(one.seconds for one in found.differences if " over " not in one.name)
    whole = found.measured.seconds - found.predicted.seconds
    assert sums == pytest.approx(whole, abs=1e-9 + 1e-6 * abs(whole))


@pytest.mark.gloo
def test_both_steps_are_on_one_time_axis(traces: Path) -> None:
    trace = read_trace(traces / "as_it_is.json")
    found = compared(GLOO, trace)
    assert "step 2 of the trace" in found.measured.chosen or "median of 3" in found.measured.chosen
    calls = {one.name: one.measured_calls for one in found.differences}
    assert calls["reduce_scatter over dp_shard"] == 4  # gloo carries it as an all-reduce
    both = overlay_document(found, GLOO, trace)
    spans = [e for e in both["traceEvents"] if e["ph"] == "X"]
    assert min(event["ts"] for event in spans) == pytest.approx(0.0, abs=1.0)
    assert {e["pid"] < 1_000_000 for e in spans} == {True, False}
    own = {"traceEvents": [e for e in both["traceEvents"] if e["pid"] < 1_000_000]}
    assert problems(own) == []


def test_a_trace_of_another_job_is_refused() -> None:
    with pytest.raises(SpecError, match="of a job of 2 ranks"):
        compared(SHARDED, {"distributedInfo": {"world_size": 2}, "traceEvents": []})
    with pytest.raises(SpecError, match="no kernel and no operator"):
        compared(SHARDED, {"traceEvents": [{"ph": "M"}]})
    with pytest.raises(SpecError, match="rank 99"):
        compared(SHARDED, {"traceEvents": []}, rank=99)
    coarse = step_timeline(replace(SHARDED), detailed=1, detail="passes")
    written = trace_document(coarse, SHARDED.layout, name="x", groups={})
    with pytest.raises(SpecError, match="--micro-batches"):
        compared(SHARDED, written)


def test_without_marks_steps_are_counted_by_their_collectives() -> None:
    once = cuda_trace(SHARDED)["traceEvents"]
    kernels = [e for e in once if e["cat"] == "kernel" and e["name"] != "warm_up"]
    length = max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels)
    twice = [*kernels, *({**e, "ts": e["ts"] + length} for e in kernels)]
    expected = {"all_gather over x": sum("AllGather" in e["name"] for e in kernels)}
    step = measured_step(
        {"traceEvents": twice}, axis_of=lambda collective, event: "x", expected_calls=expected
    )
    assert "mean of 2 steps" in step.chosen
    assert step.seconds == pytest.approx(length * 1e-6)
