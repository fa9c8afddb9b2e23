"""Windows of some steps of some ranks, beside the metrics: Chrome traces by torch's profiler, and
snapshots of memory, each with a timeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ..private_torch import dump_allocations, flight_records, record_allocations
from ..rehearse.counting import Axis
from .trace import UNKNOWN_AXIS, Communication, DeviceTime, communications, device_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which steps are profiled."""

    first: int
    """The first of them, counted from 1 as steps are reported."""
    steps: int

    @property
    def last(self) -> int:
        """The last of them."""
        return self.first + self.steps - 1


def window_edges(window: tuple[int, int] | None) -> set[int]:
    """Steps before which a window of (first step, steps) begins, or has ended."""
    return set() if window is None else {window[0], sum(window)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What a window showed."""

    communication: list[Communication]
    device: DeviceTime | None


class ProfileWindow:
    """Profiles this rank during a window; `with_stacks`: and which lines of Python asked for it."""

    def __init__(
        self,
        window: Window,
        axes: Sequence[Axis],
        device: torch.device,
        trace: Path,
        *,
        with_stacks: bool = False,
    ) -> None:
        self.window = window
        self.trace = trace
        """Where the trace goes."""
        self._with_stacks = with_stacks
        self._axes = axes
        self._first_record = 0
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._activities = [ProfilerActivity.CPU, *cuda]
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """The step of this number is about to begin."""
        if step == self.window.first:
            self._first_record = max((_number(each) for each in _records()), default=-1) + 1
            self._profiler = profile(activities=self._activities, with_stack=self._with_stacks)
            self._profiler.start()

    def after(self, step: int) -> Profiled | None:
        """The step has ended; what the window showed, if it ends with it."""
        if self._profiler is None or step != self.window.last:
            return None
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.trace))
        self._profiler = None
        trace = json.loads(self.trace.read_text(encoding="utf-8"))
        return Profiled(
            communication=communications(
                trace,
                axis_of_group={axis.group_name: axis.name for axis in self._axes},
                axes_of_gloo=self._axes_of_gloo(),
            ),
            device=device_time(trace),
        )

    def _axes_of_gloo(self) -> dict[str, set[str]]:
        """Collective -> axes that called it in the window, by the flight recorder."""
        names = {axis.group_name: axis.name for axis in self._axes}
        found: dict[str, set[str]] = {}
        for record in _records():
            if _number(record) >= self._first_record:
                collective = str(record["profiling_name"]).partition(":")[2]
                group = str(record["process_group"][0])
                found.setdefault(collective, set()).add(names.get(group, UNKNOWN_AXIS))
        return found


def _records() -> list[dict[str, Any]]:
    return flight_records(only_active=False)


def _number(record: dict[str, Any]) -> int:
    return int(record["record_id"])


def folder_of(metrics: Path | None) -> Path:
    """Where what is recorded goes: beside the metrics."""
    return Path() if metrics is None else metrics.parent


def trace_path(metrics: Path | None) -> Path:
    """This rank's trace."""
    return folder_of(metrics) / f"trace-rank-{dist.get_rank()}.json"


MOST_ALLOCATIONS = 1_000_000
"""Events of the allocator that are kept: the last ones of a window that has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes in tensors as they came and went."""

    start_bytes: int
    points: list[tuple[float, int]]
    """(seconds since the first event, bytes from then on)."""

    @property
    def peak(self) -> tuple[float, int]:
        """The point with most bytes."""
        return max(self.points, key=lambda point: point[1], default=(0.0, self.start_bytes))


def memory_timeline(changes: Iterable[tuple[float, int]], *, start_bytes: int) -> MemoryTimeline:
    """Of (microseconds, bytes that came or went), in order."""
    points: list[tuple[float, int]] = []
    level, first = start_bytes, 0.0
    for microseconds, change in changes:
        first = first if points else microseconds
        level += change
        points.append(((microseconds - first) / 1e6, level))
    return MemoryTimeline(start_bytes=start_bytes, points=points)


def allocator_changes(events: Iterable[dict[str, Any]]) -> list[tuple[float, int]]:
    """What the events of CUDA's allocator come to. Source: torch 2.13 c10/cuda/
    CUDACachingAllocator.cpp, where memory is a tensor's until its release is asked for."""
    signs = {"alloc": 1, "free_requested": -1}
    return [
        (float(event["time_us"]), signs[event["action"]] * int(event["size"]))
        for event in events
        if event["action"] in signs
    ]


def traced_changes(trace: dict[str, Any]) -> list[tuple[float, int]]:
    """What the profiler saw of the CPU's memory, in a Chrome trace."""
    events = [each for each in trace["traceEvents"] if each.get("name") == "[memory]"]
    changes = [(float(each["ts"]), int(each["args"]["Bytes"])) for each in events]
    return sorted(changes, key=lambda change: change[0])


class MemoryWindow:
    """Records what this rank allocates during a window.

    On CUDA the allocator keeps its history, which becomes a snapshot for pytorch.org/memory_viz; a
    CPU's has none, and there torch's profiler looks on and leaves its trace.
    """

    def __init__(self, window: Window, device: torch.device, folder: Path) -> None:
        self.window = window
        self._device = device
        rank = dist.get_rank()
        on_cuda = device.type == "cuda"
        name = f"memory-rank-{rank}.pickle" if on_cuda else f"memory-trace-rank-{rank}.json"
        self.snapshot = folder / name
        self.timeline = folder / f"memory-rank-{rank}.json"
        self._start_bytes = 0
        self._profiler: Any = None
        self._is_open = False

    def before(self, step: int) -> None:
        """The step of this number is about to begin."""
        if step != self.window.first:
            return
        self._is_open = True
        if self._device.type == "cuda":
            self._start_bytes = torch.cuda.memory_allocated(self._device)
            record_allocations(self._device, most=MOST_ALLOCATIONS)
            return
        self._profiler = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True
        )
        self._profiler.start()

    def after(self, step: int) -> MemoryTimeline | None:
        """The step has ended; the window's timeline, if it ends with it."""
        return self.close() if step == self.window.last else None

    def close(self) -> MemoryTimeline | None:
        """Write what there is of an open window."""
        if not self._is_open:
            return None
        self._is_open = False
        if self._device.type == "cuda":
            events = dump_allocations(self._device, str(self.snapshot))
            changes = allocator_changes(events)
        else:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.snapshot))
            self._profiler = None
            changes = traced_changes(json.loads(self.snapshot.read_text(encoding="utf-8")))
        line = memory_timeline(changes, start_bytes=self._start_bytes)
        document = {
            "start_bytes": line.start_bytes,
            "peak_bytes": line.peak[1],
            "peak_seconds": line.peak[0],
            "points": line.points,
        }
        self.timeline.write_text(json.dumps(document) + "\n", encoding="utf-8")
        return line
