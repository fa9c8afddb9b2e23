"""What traces say of communication."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.plan import Collective
from fsdpplan.trainer.rehearse.counting import OPERATORS
from fsdpplan.trainer.watch.trace import (
    COLLECTIVES,
    Interval,
    a_step,
    communications,
    device_time,
    outside,
    union,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(
        lambda pair: Interval(min(pair), max(pair))
    )
)


@given(intervals=INTERVALS, start=st.integers(0, 60), length=st.integers(0, 60))
def test_what_is_outside_is_what_no_interval_covers(
    intervals: list[Interval], start: int, length: int
) -> None:
    seconds = range(start, start + length)
    uncovered = [t for t in seconds if not any(one.start <= t < one.end for one in intervals)]
    found = outside(Interval(start, start + length), union(intervals))
    assert found == pytest.approx(len(uncovered))


def kernel(name: str, start: float, seconds: float, **about: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "args": about,
    }


def gather(start: float, seconds: float) -> dict[str, Any]:
    return kernel(
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        start,
        seconds,
        **{
            "Collective name": "_allgather_base",
            "In msg nelems": 100,
            "Out msg nelems": 800,
            "dtype": "BFloat16",
            "Process Group Name": "3",
        },
    )


def test_a_collective_is_exposed_where_no_other_kernel_runs() -> None:
    trace = {
        "traceEvents": [
            kernel("sm90_gemm", 0.0, 4.0),
            gather(1.0, 2.0),  # hidden
            gather(3.0, 3.0),  # from 4 to 5 alone
            kernel("flash_fwd", 5.0, 2.0),
            {"ph": "i", "name": "nccl"},
        ]
    }
    (row,) = communications(trace, axis_of_group={"3": "dp_shard"}, axes_of_gloo={})
    assert (row.axis, row.collective, row.count, row.bytes) == ("dp_shard", "all_gather", 2, 3200)
    assert row.seconds == pytest.approx(5.0)
    assert row.exposed_seconds == pytest.approx(1.0)


def test_a_group_that_is_no_axis_is_unknown() -> None:
    trace = {"traceEvents": [gather(1.0, 2.0)]}
    (row,) = communications(trace, axis_of_group={}, axes_of_gloo={})
    assert row.axis == "unknown"


def gloo(name: str) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"gloo:{name}", "ts": 0.0, "dur": 5e5}


def test_gloo_says_how_long_and_only_a_lone_axis() -> None:
    trace = {"traceEvents": [gloo("all_gather"), gloo("all_gather"), gloo("all_reduce")]}
    axes = {"all_gather": {"dp_shard"}, "all_reduce": {"tp", "dp_replicate"}}
    rows = communications(trace, axis_of_group={}, axes_of_gloo=axes)
    assert [(row.axis, row.collective, row.exposed_seconds) for row in rows] == [
        ("dp_shard", "all_gather", None),
        ("unknown", "all_reduce", None),
    ]


def test_gloo_tells_its_group_by_its_threads() -> None:
    """Two threads a group, in the order of the groups; votes to stop are no part of a step."""
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg"},
        {"pg_name": "1", "pg_desc": "stop votes"},
    ]
    trace = {
        "distributedInfo": {"pg_config": groups},
        "traceEvents": [
            {**gloo("all_reduce"), "tid": 41},
            {**gloo("all_reduce"), "tid": 42},
            {**gloo("all_reduce"), "tid": 76},
        ],
    }
    axes = {"all_reduce": {"dp_shard", "unknown"}}
    (row,) = communications(trace, axis_of_group={"0": "dp_shard"}, axes_of_gloo=axes)
    assert (row.axis, row.count) == ("dp_shard", 2)
    trace["distributedInfo"]["pg_config"] = groups[:1]  # type: ignore[index]
    (row,) = communications(trace, axis_of_group={"0": "dp_shard"}, axes_of_gloo=axes)
    assert (row.axis, row.count) == ("unknown", 3)


def test_an_event_is_of_one_step() -> None:
    trace = {"traceEvents": [gather(0.0, 2.0), gather(2.0, 2.0)]}
    (row,) = communications(trace, axis_of_group={"3": "dp_shard"}, axes_of_gloo={})
    assert a_step(row, 2) == {
        "axis": "dp_shard",
        "collective": "all_gather",
        "seconds": pytest.approx(2.0),
        "exposed_seconds": pytest.approx(2.0),
        "count": 1,
        "bytes": 1600,
    }


def test_collectives_have_the_names_of_an_estimate() -> None:
    assert set(COLLECTIVES.values()) == set(get_args(Collective))


def test_what_is_counted_has_the_names_of_an_estimate_and_both_ends_of_a_message() -> None:
    counted = {operator.collective for operator in OPERATORS.values()}
    assert counted == set(get_args(Collective)) - {"send_recv"} | {"send", "recv"}


def operator(name: str, start: float, seconds: float, *, thread: int = 1) -> dict[str, Any]:
    return {**kernel(name, start, seconds), "cat": "cpu_op", "tid": thread}


def test_operators_of_the_thread_that_trains_hide_gloo() -> None:
    waiting = {**gloo("all_gather"), "ts": 1e6, "dur": 4e6, "tid": 2}
    trace = {
        "traceEvents": [
            operator("aten::mm", 0.0, 2.0),
            operator("aten::t", 0.5, 0.5),
            operator("aten::mm", 4.0, 2.0),
            operator("_c10d_functional::wait_tensor", 2.0, 2.0),
            # what gloo's own thread does is no work of the step
            operator("aten::copy_", 2.0, 2.0, thread=2),
            waiting,
        ]
    }
    (row,) = communications(trace, axis_of_group={}, axes_of_gloo={"all_gather": {"dp_shard"}})
    assert row.seconds == pytest.approx(4.0)
    assert row.exposed_seconds == pytest.approx(2.0)
    found = device_time(trace)
    assert found is not None
    assert found.seconds == pytest.approx(6.0)
    assert found.idle_seconds == pytest.approx(0.0)


def test_a_device_is_idle_where_no_kernel_and_no_copy_runs() -> None:
    copy = {**kernel("Memcpy HtoD", 5.0, 1.0), "cat": "gpu_memcpy"}
    trace = {
        "traceEvents": [
            kernel("sm90_gemm", 1.0, 2.0),
            gather(2.0, 1.5),
            copy,
            kernel("flash_fwd", 8.0, 2.0),
            operator("aten::mm", 0.0, 20.0),
        ]
    }
    found = device_time(trace)
    assert found is not None
    assert found.seconds == pytest.approx(9.0)
    assert found.idle_seconds == pytest.approx(1.5 + 2.0)
    assert device_time({"traceEvents": []}) is None
