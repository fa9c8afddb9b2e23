"""Clocks: seconds of each repeat of a call, on a GPU by its own events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

FLUSH_BYTES = 512 * 2**20
"""Written before each repeat. It is more than any cache holds, and takes a GPU longer than the host
needs to put the repeat behind it, so that no gap between kernels is counted."""


class Clock(Protocol):
    """Times calls."""

    def repeats(self, call: Call, *, count: int, align: Call) -> list[float]:
        """Seconds of each of `count` calls, `align` before each."""

    def run(self, call: Call, *, count: int) -> list[float]:
        """Seconds of each of `count` calls without a pause between them."""


class HostClock(Clock):
    """The host's own clock: for CPU processes, and for what the host does."""

    def __init__(self, synchronize: Call | None = None) -> None:
        self._synchronize = synchronize or (lambda: None)

    def repeats(self, call: Call, *, count: int, align: Call) -> list[float]:
        seconds = []
        for _ in range(count):
            align()
            self._synchronize()
            began = time.perf_counter()
            call()
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds

    def run(self, call: Call, *, count: int) -> list[float]:
        return self.repeats(call, count=count, align=lambda: None)


class CudaClock(Clock):
    """Events on the GPU's stream; the host runs ahead, as it does in training."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def repeats(self, call: Call, *, count: int, align: Call) -> list[float]:
        def before() -> None:
            self._flushed.zero_()
            align()

        return self._timed(call, count=count, before=before)

    def run(self, call: Call, *, count: int) -> list[float]:
        return self._timed(call, count=count, before=lambda: None)

    def _timed(self, call: Call, *, count: int, before: Call) -> list[float]:
        import torch

        marks = []
        torch.cuda.synchronize()
        for _ in range(count):
            before()
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def host_clock_of(device: torch.device) -> Clock:
    """The clock for what the host does until `device` is done."""
    import torch

    return HostClock(torch.cuda.synchronize if device.type == "cuda" else None)
