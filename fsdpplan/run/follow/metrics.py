"""What a running job reports: the events of its metrics file, read while it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpplan.run.follow.metric_events import Checkpoint as Checkpoint
from fsdpplan.run.follow.metric_events import Communication as Communication
from fsdpplan.run.follow.metric_events import Event as Event
from fsdpplan.run.follow.metric_events import OutOfMemory as OutOfMemory
from fsdpplan.run.follow.metric_events import Profiled as Profiled
from fsdpplan.run.follow.metric_events import Start as Start
from fsdpplan.run.follow.metric_events import Step as Step
from fsdpplan.run.follow.metric_events import Summary as Summary
from fsdpplan.run.follow.metric_events import parse_event as parse_event
from fsdpplan.run.follow.tail import FileTail

WARMUP_STEPS = 5
"""Steps at the start of a run that no median counts, as in the trainer's own summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that one run has reported."""

    start: Start | None = None
    steps: tuple[Step, ...] = ()
    summary: Summary | None = None
    communication: tuple[Communication, ...] = ()
    """The newest of each axis and collective."""
    checkpoints: tuple[Checkpoint, ...] = ()
    profiled: Profiled | None = None
    """The newest window."""
    out_of_memory: OutOfMemory | None = None
    """Of the ranks that ran out, that which needed most."""

    def plus(self, event: Event) -> Measured:
        """With one more event."""
        match event:
            case Start():
                # A job that found all of its steps done has nothing to tell of them.
                return self if event.is_done and self.steps else Measured(start=event)
            case Step():
                return replace(self, steps=(*self.steps, event), summary=None)
            case Summary():
                told_before = self.summary is not None and event.steps_measured == 0
                return self if told_before else replace(self, summary=event)
            case Communication():
                return replace(self, communication=_newest(self.communication, event))
            case Checkpoint():
                return replace(self, checkpoints=(*self.checkpoints, event))
            case Profiled():
                return replace(self, profiled=event)
            case OutOfMemory():
                worst = self.out_of_memory
                is_worse = worst is None or (event.needed_bytes or 0) > (worst.needed_bytes or 0)
                return replace(self, out_of_memory=event if is_worse else worst)

    def plus_all(self, events: Iterable[Event]) -> Measured:
        """With more events, in their order."""
        measured, steps = self, list[Step]()
        for event in events:
            if isinstance(event, Step):
                steps.append(event)
            else:
                measured, steps = measured._plus_steps(steps).plus(event), []
        return measured._plus_steps(steps)

    def _plus_steps(self, steps: list[Step]) -> Measured:
        return replace(self, steps=(*self.steps, *steps), summary=None) if steps else self

    @property
    def last_step(self) -> int:
        """Steps that are done, those before this start too."""
        if self.steps:
            return self.steps[-1].step
        return 0 if self.start is None else self.start.first_step

    @property
    def precision(self) -> str | None:
        """Of the steps that the summary tells of, or of the last one; None: not said."""
        if self.summary is not None and self.summary.precision is not None:
            return self.summary.precision
        return self.steps[-1].precision if self.steps else None

    @property
    def is_complete(self) -> bool:
        """Whether the last step is done; False where the program did not say which that is."""
        last = None if self.start is None else self.start.steps
        return last is not None and self.last_step >= last

    @property
    def left_seconds(self) -> float | None:
        """Until the last step, at the pace so far; None: not known."""
        last = None if self.start is None else self.start.steps
        seconds = self.median("step_seconds")
        if last is None or seconds is None:
            return None
        return max(0, last - self.last_step) * seconds

    def median(self, name: str) -> float | None:
        """Median of a field of the steps, without the first few."""
        values = [value for step in self.steps if (value := getattr(step, name)) is not None]
        counted = values[min(WARMUP_STEPS, len(values) // 2) :]
        return statistics.median(counted) if counted else None

    def median_save(self, name: str) -> float | None:
        """Median of a field of the checkpoints."""
        values = [value for one in self.checkpoints if (value := getattr(one, name)) is not None]
        return statistics.median(values) if values else None

    @property
    def measured_steps(self) -> int:
        """Steps that the medians count."""
        if self.summary is not None and self.summary.steps_measured is not None:
            return self.summary.steps_measured
        steps = sum(step.step_seconds is not None for step in self.steps)
        return steps - min(WARMUP_STEPS, steps // 2)

    def peak(self, name: str) -> int | None:
        """Largest value of a field of the steps."""
        values = [value for step in self.steps if (value := getattr(step, name)) is not None]
        return max(values, default=None)


def _newest(known: tuple[Communication, ...], event: Communication) -> tuple[Communication, ...]:
    kept = (one for one in known if (one.axis, one.collective) != (event.axis, event.collective))
    return (*kept, event)


def read_metrics(text: str) -> Measured:
    """All that a metrics file says of its last run."""
    events = map(parse_event, text.splitlines())
    return Measured().plus_all(event for event in events if event is not None)


ENDS_BYTES = 256 * 1024
"""Of a file's beginning and of its end, that are read where the middle does not matter."""


def read_ends(path: Path) -> Measured:
    """What a metrics file says at its beginning and at its end, of a run that may be long; nothing
    where there is no file."""
    try:
        with path.open("rb") as file:
            text = file.read(ENDS_BYTES)
            size = file.seek(0, os.SEEK_END)
            if size > ENDS_BYTES:
                file.seek(max(ENDS_BYTES, size - ENDS_BYTES))
                # The lines at the seam are no JSON, and so no events.
                text += b"\n" + file.read()
    except OSError:
        return Measured()
    return read_metrics(text.decode(errors="replace"))


class MetricsTail:
    """Reads the events that are added to a metrics file from now on, or all from its start."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._tail = FileTail(path, from_start=from_start)

    def poll(self) -> list[Event]:
        """Events since the last call."""
        events = (parse_event(line) for line in self._tail.poll())
        return [event for event in events if event is not None]
