"""What a person sees of a running job, on stderr."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from fsdpplan.run.metrics import Measured
from fsdpplan.units import format_percent, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_STEP_LINE = re.compile(r"(?:\d+: )?step \d+/\d+ ")
"""The trainer's own line a step, perhaps behind srun's label."""


class Display(AbstractContextManager["Display"], Protocol):
    """Takes what happens to a job."""

    def state(self, text: str) -> None:
        """Something that fsdpplan did or saw."""

    def output(self, line: str) -> None:
        """A line that the job printed."""

    def progress(self, measured: Measured) -> None:
        """The job reported something new."""


class PlainDisplay(Display):
    """For logs and pipes: the job's own lines as they come, nothing else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def state(self, text: str) -> None:
        print(f"fsdpplan: {text}", file=self._stream, flush=True)

    def output(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def progress(self, measured: Measured) -> None:
        """Nothing: the job prints a line for each step."""


class LiveDisplay(Display):
    """For a person: one moving line, and above it whatever is not a step."""

    def __init__(self) -> None:
        self._progress = _progress_line()
        self._task: TaskID | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def state(self, text: str) -> None:
        self.output(f"fsdpplan: {text}")

    def output(self, line: str) -> None:
        if self._task is None or not _STEP_LINE.match(line):
            self._progress.console.print(
                line, markup=False, highlight=False, emoji=False, soft_wrap=True
            )

    def progress(self, measured: Measured) -> None:
        if not measured.steps:
            return
        if self._task is None:
            # Not before: its thread must not be there when the job is forked off.
            self._progress.start()
            total = measured.start.steps if measured.start else None
            self._task = self._progress.add_task("", total=total)
        last = measured.steps[-1]
        self._progress.update(self._task, completed=last.step, description=step_words(measured))


def display_for(stream: TextIO) -> Display:
    """A moving line where a person looks, plain lines otherwise."""
    return LiveDisplay() if stream.isatty() else PlainDisplay(stream)


def step_words(measured: Measured) -> str:
    """The last step in a few words."""
    last = measured.steps[-1]
    parts = [f"step {last.step}"]
    if last.loss is not None:
        parts.append(f"loss {last.loss:.3f}")
    if last.step_seconds is not None:
        parts.append(format_seconds(last.step_seconds))
    if last.mfu_fraction is not None:
        parts.append(f"MFU {format_percent(last.mfu_fraction)}")
    return "  ".join(parts)


def _progress_line() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
