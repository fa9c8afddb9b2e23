"""What a profiler's trace says: how long communication took, how much of it nothing hid, and how
long nothing ran at all."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .kinds import is_gloo, is_nccl

UNKNOWN_AXIS = "unknown"

COLLECTIVES = {
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "broadcast": "broadcast",
    "send": "send_recv",
    "recv": "send_recv",
}
"""How torch's NCCL backend names a collective in a trace, and how an estimate does."""

DTYPE_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}


ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what keeps a device busy."""


class Interval(NamedTuple):
    """From when to when, in one unit."""

    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """All calls of one collective on one axis."""

    axis: str
    collective: str
    seconds: float
    exposed_seconds: float | None
    """Part in which no kernel ran beside it, on CPUs no operator; None: the trace does not say."""
    count: int
    bytes: int | None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not touch, in order."""
    merged: list[Interval] = []
    for each in sorted(intervals):
        if each.end <= each.start:
            continue
        if merged and each.start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].end, each.end))
        else:
            merged.append(each)
    return merged


def outside(interval: Interval, covered: Sequence[Interval]) -> float:
    """How much of `interval` lies outside of `covered`, which is a union."""
    first = max(0, bisect(covered, interval) - 1)
    hidden = 0.0
    for each in covered[first:]:
        if each.start >= interval.end:
            break
        hidden += max(0.0, min(interval.end, each.end) - max(interval.start, each.start))
    return max(0.0, interval.end - interval.start - hidden)


def communications(
    trace: Mapping[str, Any],
    *,
    axis_of_group: Mapping[str, str],
    axes_of_gloo: Mapping[str, set[str]],
) -> list[Communication]:
    """The collectives of a Chrome trace of torch's profiler, summed.

    Those of NCCL are kernels, named by their group, and exposed where no other kernel runs. Those
    of gloo are spans of its threads, which tell their group or nothing: `axes_of_gloo` has the axes
    that use a collective, and only a single one is named then. What hides them are operators of the
    thread that trains.
    """
    events = with_groups(trace, _spans(trace))
    kernels = [event for event in events if event.get("cat") == "kernel"]
    nccl = [event for event in kernels if _is_nccl(event)]
    if nccl:
        compute = union(_interval(event) for event in kernels if not _is_nccl(event))
        return _summed(_of_nccl(event, compute, axis_of_group) for event in nccl)
    operators = union(_operators(events))
    gloo = [event for event in events if _is_gloo(event) and not _is_beside(event)]
    return _summed(_of_gloo(event, operators, axis_of_group, axes_of_gloo) for event in gloo)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """A window as its device saw it."""

    seconds: float
    """From the beginning of its first kernel to the end of its last one."""
    idle_seconds: float
    """Part of it in which none ran, nor any copy; on CPUs no operator, nor any collective."""


def device_time(trace: Mapping[str, Any]) -> DeviceTime | None:
    """How long nothing ran, in a Chrome trace of torch's profiler; None where it has no kernel and
    no operator."""
    events = _spans(trace)
    busy = union(_interval(event) for event in events if event.get("cat") in ON_DEVICE)
    if not busy:
        collectives = (_interval(event) for event in events if _is_gloo(event))
        busy = union([*_operators(events), *collectives])
    if not busy:
        return None
    whole = Interval(busy[0].start, busy[-1].end)
    return DeviceTime(seconds=whole.end - whole.start, idle_seconds=outside(whole, busy))


def _spans(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]


def _operators(events: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """When operators ran on the thread that has most of them: it trains. The threads of gloo, and
    one that writes a checkpoint, have operators, too."""
    of_thread: dict[Any, list[Interval]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and str(event["name"]).startswith("aten::"):
            of_thread.setdefault(event.get("tid"), []).append(_interval(event))
    return max(of_thread.values(), key=len, default=[])


def _is_nccl(event: Mapping[str, Any]) -> bool:
    return is_nccl(str(event["name"]))


def _is_gloo(event: Mapping[str, Any]) -> bool:
    return is_gloo(str(event["name"]))


def with_groups(
    document: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Gloo's spans with the group that they are of, as NCCL's kernels say theirs.

    Each group has threads of its own, made right behind one another, in the order of the groups.
    Where there are not as many such bundles as groups nothing is said.
    Source: torch 2.13 ProcessGroupGloo.cpp, whose constructor starts its threads.
    """
    config = document.get("distributedInfo", {}).get("pg_config", ())
    tids = {event.get("tid") for event in events if is_gloo(str(event.get("name", "")))}
    numbers = sorted(tid for tid in tids if isinstance(tid, int))
    if not numbers or len(numbers) != len(tids):
        return list(events)
    bundles: list[list[int]] = []
    for tid in numbers:
        if bundles and tid - bundles[-1][-1] <= 1:
            bundles[-1].append(tid)
        else:
            bundles.append([tid])
    if len(bundles) != len(config):
        return list(events)
    of = {
        tid: {
            "Process Group Name": str(one.get("pg_name", "")),
            "Process Group Description": str(one.get("pg_desc", "")),
        }
        for bundle, one in zip(bundles, config, strict=True)
        for tid in bundle
    }
    return [
        {**event, "args": {**event.get("args", {}), **of[event["tid"]]}}
        if is_gloo(str(event.get("name", "")))
        else event
        for event in events
    ]


NOT_OF_A_STEP = frozenset({"stop votes"})
"""Descriptions of groups whose collectives run beside steps, and are waited for by none."""


def _interval(event: Mapping[str, Any]) -> Interval:
    """In seconds; traces have microseconds."""
    start, duration = float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6
    return Interval(start, start + duration)


def _of_nccl(
    event: Mapping[str, Any], compute: Sequence[Interval], axis_of_group: Mapping[str, str]
) -> Communication:
    interval, about = _interval(event), event.get("args", {})
    name = str(about.get("Collective name", ""))
    group = str(about.get("Process Group Name", ""))
    width = DTYPE_BYTES.get(str(about.get("dtype", "")))
    elements = max(int(about.get("In msg nelems", 0)), int(about.get("Out msg nelems", 0)))
    return Communication(
        axis=axis_of_group.get(group, UNKNOWN_AXIS),
        collective=COLLECTIVES.get(name, name or str(event["name"]).split("(")[0]),
        seconds=interval.end - interval.start,
        exposed_seconds=outside(interval, compute),
        count=1,
        bytes=None if width is None else elements * width,
    )


def _is_beside(event: Mapping[str, Any]) -> bool:
    return event.get("args", {}).get("Process Group Description") in NOT_OF_A_STEP


def _of_gloo(
    event: Mapping[str, Any],
    operators: Sequence[Interval],
    axis_of_group: Mapping[str, str],
    axes_of_gloo: Mapping[str, set[str]],
) -> Communication:
    interval = _interval(event)
    collective = str(event["name"]).partition(":")[2]
    axes = axes_of_gloo.get(collective, set())
    lone = next(iter(axes)) if len(axes) == 1 else UNKNOWN_AXIS
    group = str(event.get("args", {}).get("Process Group Name", ""))
    return Communication(
        axis=axis_of_group.get(group, lone),
        collective=collective,
        seconds=interval.end - interval.start,
        exposed_seconds=outside(interval, operators) if operators else None,
        count=1,
        bytes=None,
    )


def _summed(calls: Iterable[Communication]) -> list[Communication]:
    rows: dict[tuple[str, str], list[Communication]] = {}
    for call in calls:
        rows.setdefault((call.axis, call.collective), []).append(call)
    return [
        Communication(
            axis=axis,
            collective=collective,
            seconds=sum(call.seconds for call in its),
            exposed_seconds=_sum([call.exposed_seconds for call in its]),
            count=len(its),
            bytes=None if (size := _sum([call.bytes for call in its])) is None else int(size),
        )
        for (axis, collective), its in rows.items()
    ]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def a_step(row: Communication, steps: int) -> dict[str, Any]:
    """A row of `steps` steps as the event of one."""
    exposed, size = row.exposed_seconds, row.bytes
    return {
        "axis": row.axis,
        "collective": row.collective,
        "seconds": row.seconds / steps,
        "exposed_seconds": None if exposed is None else exposed / steps,
        "count": round(row.count / steps),
        "bytes": None if size is None else round(size / steps),
    }
