"""Chrome: a predicted step as the trace-event JSON that torch's profiler writes.

    pid    rank of the job: the first one of each pipeline stage
    tid    stream; waits have a row of their own, as a profile has nothing where a device waits

Kernels have category `kernel`, copies from and to the host `gpu_memcpy`, passes and FSDP's steps
`gpu_user_annotation`, and collectives the arguments of torch's `record_param_comms`. Times are in
microseconds. Source: the trace event format (Google, "Trace Event Format", 2016), and what
torch 2.13's kineto writes (libkineto/src/output_json.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from fsdpplan.cost.network.placement import pp_group
from fsdpplan.cost.timeline.events import COMPUTE, STREAMS, Event, MemoryPoint, Timeline
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.training import DTYPE_BYTES

TraceEvent = dict[str, Any]

_TIDS: Final = {stream: 7 + place for place, stream in enumerate(STREAMS)}
"""Streams that torch makes have numbers from 7 on."""
_WAITS_TID = 90
_STEP_TID = 1

_COLLECTIVES: Final = {
    "all_gather": ("_allgather_base", "AllGather_RING_LL"),
    "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter_Sum_{dtype}_RING_LL"),
    "all_reduce": ("allreduce", "AllReduce_Sum_{dtype}_RING_LL"),
    "all_to_all": ("all_to_allv", "SendRecv"),
    "send_recv": ("send", "SendRecv"),
    "broadcast": ("broadcast", "Broadcast_RING_LL"),
}
"""How torch names a collective in `record_param_comms`, and NCCL its kernel."""

_DTYPES: Final = {
    "fp32": ("Float", "f32"),
    "bf16": ("BFloat16", "bf16"),
    "fp16": ("Half", "f16"),
    "fp8": ("Byte", "u8"),
}
"""As torch and NCCL name them."""

_KERNELS: Final = {
    "matmul": "gemm",
    "attention": "flash_attention",
    "elementwise": "elementwise_kernel",
    "copy": "split_with_sizes_copy",
    "gradients": "elementwise_kernel add",
    "optimizer": "multi_tensor_apply_kernel",
}
"""What a predicted kernel's name begins with: words by which profiles are read."""


def stage_rank(layout: Layout, stage: int) -> int:
    """The job's first rank that has a pipeline stage: pipelines are outermost in the mesh."""
    return stage * pp_group(layout).stride


def rank_stage(layout: Layout, rank: int) -> int:
    """The pipeline stage that a rank of the job has."""
    return rank // pp_group(layout).stride


def trace_document(
    timeline: Timeline,
    layout: Layout,
    *,
    name: str,
    groups: Mapping[str, Sequence[int]],
    start_us: float = 0.0,
    ranks: Iterable[int] | None = None,
) -> dict[str, Any]:
    """A whole trace of the pipeline `ranks`, or of all; `groups`: the ranks of the first rank's
    group on each axis."""
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": name,
        "predicted": True,
        "distributedInfo": {
            "backend": "nccl",
            "rank": 0,
            "world_size": layout.world,
            "pg_count": len(groups),
            "pg_config": [
                {
                    "pg_name": axis,
                    "pg_desc": group_description(axis),
                    "backend_config": "cuda:nccl",
                    "pg_size": len(members),
                    "ranks": list(members),
                }
                for axis, members in groups.items()
            ],
        },
        "traceEvents": list(trace_events(timeline, layout, start_us=start_us, ranks=ranks)),
    }


def group_description(axis: str) -> str:
    """As torch's device mesh describes the group of an axis."""
    return f"mesh_{axis.replace('*', '_').replace('/', '_by_')}"


def trace_events(
    timeline: Timeline,
    layout: Layout,
    *,
    start_us: float = 0.0,
    ranks: Iterable[int] | None = None,
    label: str = "predicted",
) -> Iterator[TraceEvent]:
    """The events of some pipeline ranks, with the names of their rows first."""
    wanted = set(range(layout.pp) if ranks is None else ranks)
    by_rank: dict[int, list[Event]] = {rank: [] for rank in sorted(wanted)}
    for event in timeline.events:
        if event.rank in wanted:
            by_rank[event.rank].append(event)
    for rank, events in by_rank.items():
        pid = stage_rank(layout, rank)
        stage = f", pipeline stage {rank}" if layout.pp > 1 else ""
        yield from _names(pid, f"rank {pid}{stage} ({label})", events)
        yield _span(
            "ProfilerStep#0", "user_annotation", pid, _STEP_TID, start_us, timeline.step_seconds
        )
        for event in events:
            yield _event(event, pid, start_us)
        yield from _passes(events, pid, start_us)
    yield from _messages(by_rank, layout, start_us)
    for point in timeline.memory:
        if point.rank in wanted:
            yield _memory(point, stage_rank(layout, point.rank), start_us)


def _names(pid: int, name: str, events: Iterable[Event]) -> Iterator[TraceEvent]:
    rows = {_STEP_TID: "step", _WAITS_TID: "waits"}
    used = {_TIDS[event.stream]: event.stream for event in events}
    rows |= {tid: f"stream {tid} {stream}" for tid, stream in used.items()}
    yield _metadata("process_name", pid, 0, {"name": name})
    yield _metadata("process_labels", pid, 0, {"labels": "GPU 0"})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    for tid, row in sorted(rows.items()):
        yield _metadata("thread_name", pid, tid, {"name": row})
        yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _span(
    name: str,
    category: str,
    pid: int,
    tid: int,
    ts: float,
    seconds: float,
    args: dict[str, Any] | None = None,
) -> TraceEvent:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": seconds * 1e6,
        "args": args or {},
    }


def _event(event: Event, pid: int, start_us: float) -> TraceEvent:
    ts = start_us + event.start_seconds * 1e6
    about: dict[str, Any] = {"kind": event.kind, "term": event.term}
    for word in ("direction", "micro_batch", "stage", "block", "cause"):
        value = getattr(event, word)
        if value not in ("", None):
            about[word] = value
    if event.traffic is not None:
        name, args = _collective(event)
        return _span(name, "kernel", pid, _TIDS[event.stream], ts, event.seconds, {**args, **about})
    if event.kind in ("upload", "download"):
        way = "HtoD (Pinned -> Device)" if event.kind == "upload" else "DtoH (Device -> Pinned)"
        about["unit"] = event.name
        tid = _TIDS[event.stream]
        return _span(f"Memcpy {way}", "gpu_memcpy", pid, tid, ts, event.seconds, about)
    if event.kind in ("wait", "bubble", "launch", "host"):
        return _span(event.name, "wait", pid, _WAITS_TID, ts, event.seconds, about)
    words = _KERNELS.get(event.kind, "")
    name = f"{words} {event.name}".strip()
    return _span(name, "kernel", pid, _TIDS[event.stream], ts, event.seconds, about)


def _collective(event: Event) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a collective's kernel."""
    traffic = event.traffic
    assert traffic is not None
    called, kernel = _COLLECTIVES[traffic.collective]
    of_torch, of_nccl = _DTYPES.get(traffic.dtype, (traffic.dtype, traffic.dtype))
    whole = traffic.bytes // DTYPE_BYTES.get(traffic.dtype, 1)
    split = whole // traffic.ranks
    sizes = {"all_gather": (split, whole), "reduce_scatter": (whole, split)}
    into, out = sizes.get(traffic.collective, (whole, whole))
    name = kernel.format(dtype=of_nccl)
    args = {
        "Collective name": called,
        "In msg nelems": into,
        "Out msg nelems": out,
        "Group size": traffic.ranks,
        "dtype": of_torch,
        "Process Group Name": traffic.axis,
        "Process Group Description": group_description(traffic.axis),
        "level": traffic.level,
        "bytes": traffic.bytes,
        "calls": traffic.count,
        "for": event.name,
    }
    return f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)", args


def _passes(events: Sequence[Event], pid: int, start_us: float) -> Iterator[TraceEvent]:
    """Passes through blocks, as spans around their kernels."""
    last: tuple[Any, ...] | None = None
    begin = end = 0.0
    tid = _TIDS[COMPUTE]

    def closed() -> Iterator[TraceEvent]:
        if last is not None:
            micro_batch, direction, block = last
            name = f"layers.{block} {direction}, micro-batch {micro_batch}"
            ts = start_us + begin * 1e6
            yield _span(name, "gpu_user_annotation", pid, tid, ts, end - begin)

    for event in events:
        if event.stream != COMPUTE or event.kind in ("wait", "bubble", "launch", "host"):
            continue
        direction = "forward" if event.direction == "forward" else "backward"
        key = (event.micro_batch, direction, event.block) if event.block is not None else None
        if key != last:
            yield from closed()
            last, begin = key, event.start_seconds
        end = event.end_seconds
    yield from closed()


def _messages(
    by_rank: Mapping[int, Sequence[Event]], layout: Layout, start_us: float
) -> Iterator[TraceEvent]:
    """Arrows of a pipeline: from each message to the pass of another rank that needs it."""
    begins: dict[tuple[int, int, bool], Event] = {}
    messages: list[tuple[int, int, Event]] = []
    for events in by_rank.values():
        for event in events:
            if event.stage is None or event.micro_batch is None:
                continue
            is_forward = event.direction == "forward"
            if event.stream.startswith("pp_"):
                messages.append((event.stage, event.micro_batch, event))
            elif event.stream == COMPUTE and event.term == "compute":
                begins.setdefault((event.stage, event.micro_batch, is_forward), event)
    for number, (stage, micro_batch, message) in enumerate(messages):
        is_forward = message.direction == "forward"
        taker = stage + (1 if is_forward else -1)
        begun = begins.get((taker, micro_batch, is_forward))
        if begun is None:
            continue
        for phase, at in (("s", message), ("f", begun)):
            yield {
                "ph": phase,
                "id": number,
                "cat": "message",
                "name": message.name,
                "pid": stage_rank(layout, at.rank),
                "tid": _TIDS[at.stream],
                "ts": start_us + at.start_seconds * 1e6,
                **({"bp": "e"} if phase == "f" else {}),
            }


def _memory(point: MemoryPoint, pid: int, start_us: float) -> TraceEvent:
    """A counter, in bytes, stacked by part."""
    return {
        "ph": "C",
        "cat": "memory",
        "name": "allocated bytes",
        "pid": pid,
        "tid": 0,
        "ts": start_us + point.start_seconds * 1e6,
        "args": point.terms,
    }
