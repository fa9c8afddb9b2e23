"""A window of torch's profiler: some steps of some ranks, as Chrome traces beside the metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ..private_torch import flight_records
from ..rehearse.counting import Axis
from .trace import UNKNOWN_AXIS, Communication, communications


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


class ProfileWindow:
    """Profiles this rank during a window."""

    def __init__(
        self, window: Window, axes: Sequence[Axis], device: torch.device, trace: Path
    ) -> None:
        self.window = window
        self.trace = trace
        """Where the trace goes."""
        self._axes = axes
        self._first_record = 0
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._activities = [ProfilerActivity.CPU, *cuda]
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """The step of this number is about to begin."""
        if step == self.window.first:
            self._first_record = max((_number(each) for each in _records()), default=-1) + 1
            self._profiler = profile(activities=self._activities)
            self._profiler.start()

    def after(self, step: int) -> list[Communication] | None:
        """The step has ended; the window's communication, if it ends with it."""
        if self._profiler is None or step != self.window.last:
            return None
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.trace))
        self._profiler = None
        return communications(
            json.loads(self.trace.read_text(encoding="utf-8")),
            axis_of_group={axis.group_name: axis.name for axis in self._axes},
            axes_of_gloo=self._axes_of_gloo(),
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


def trace_path(metrics: Path | None) -> Path:
    """This rank's trace, beside the metrics."""
    folder = Path() if metrics is None else metrics.parent
    return folder / f"trace-rank-{dist.get_rank()}.json"
