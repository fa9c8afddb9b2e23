"""What a running job reports: the events of its metrics file, read while it grows."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from fsdpplan.run.tail import FileTail

WARMUP_STEPS = 5
"""Steps at the start of a run that no median counts, as in the trainer's own summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run began; what an earlier run of the same file wrote is over."""

    first_step: int
    """Steps done before it: above 0 when it resumed."""
    steps: int | None
    """Step at which it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step. None: not reported."""

    step: int
    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu_fraction: float | None
    allocated_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run. None: not reported."""

    step_seconds: float | None
    """Median over the steps after the first few."""
    tokens_per_second: float | None
    mfu_fraction: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    memory_kind: str | None
    """`allocator`: of torch's CUDA allocator; `resident`: of the process."""
    world: int | None


Event = Start | Step | Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that one run has reported."""

    start: Start | None = None
    steps: tuple[Step, ...] = ()
    summary: Summary | None = None

    def plus(self, event: Event) -> Measured:
        """With one more event."""
        match event:
            case Start():
                return Measured(start=event)
            case Step():
                return Measured(start=self.start, steps=(*self.steps, event), summary=None)
            case Summary():
                return Measured(start=self.start, steps=self.steps, summary=event)

    def median(self, name: str) -> float | None:
        """Median of a field of the steps, without the first few."""
        values = [value for step in self.steps if (value := getattr(step, name)) is not None]
        counted = values[min(WARMUP_STEPS, len(values) // 2) :]
        return statistics.median(counted) if counted else None

    def peak(self, name: str) -> int | None:
        """Largest value of a field of the steps."""
        values = [value for step in self.steps if (value := getattr(step, name)) is not None]
        return max(values, default=None)


class MetricsTail:
    """Reads the events that are added to a metrics file from now on."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)

    def poll(self) -> list[Event]:
        """Events since the last call."""
        events = (parse_event(line) for line in self._tail.poll())
        return [event for event in events if event is not None]


def parse_event(line: str) -> Event | None:
    """The event on one line of a metrics file, or None for a line that is none of ours.

    A line without `event` that has a step is a step: programs of the user's own may write those.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    match record.get("event", "step"):
        case "start":
            return Start(first_step=_whole(record, "step") or 0, steps=_whole(record, "steps"))
        case "step":
            return _step(record)
        case "summary":
            return _summary(record)
        case _:
            return None


def _step(record: dict[str, object]) -> Step | None:
    step = _whole(record, "step")
    if step is None:
        return None
    return Step(
        step=step,
        loss=_number(record, "loss"),
        step_seconds=_number(record, "step_seconds"),
        tokens_per_second=_number(record, "tokens_per_second"),
        mfu_fraction=_number(record, "mfu_fraction"),
        allocated_bytes=_whole(record, "allocated_bytes"),
        reserved_bytes=_whole(record, "reserved_bytes"),
    )


def _summary(record: dict[str, object]) -> Summary:
    kind = record.get("memory_kind")
    return Summary(
        step_seconds=_number(record, "step_seconds"),
        tokens_per_second=_number(record, "tokens_per_second"),
        mfu_fraction=_number(record, "mfu_fraction"),
        peak_allocated_bytes=_whole(record, "peak_allocated_bytes"),
        peak_reserved_bytes=_whole(record, "peak_reserved_bytes"),
        memory_kind=kind if isinstance(kind, str) else None,
        world=_whole(record, "world"),
    )


def _number(record: dict[str, object], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(record: dict[str, object], key: str) -> int | None:
    value = record.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
