"""What a person sees of a running job, on stderr."""

from __future__ import annotations

import os
import re
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from fsdpplan.emit.safe_text import log_line, may_move
from fsdpplan.run.follow.metrics import Measured
from fsdpplan.units import format_percent, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_STEP_LINE = re.compile(r"(?: *\S+: )?step \d+/\d+ ")
"""The trainer's own line a step, perhaps behind srun's label or a host's name."""


class Display(AbstractContextManager["Display"], Protocol):
    """Takes what happens to a job."""

    def state(self, text: str) -> None:
        """Something that fsdpplan did or saw."""

    def output(self, line: str) -> None:
        """A line that the job printed."""

    def progress(self, measured: Measured) -> None:
        """The job reported something new."""

    def confirms(self, question: str) -> bool:
        """Whether the person says yes, or says nothing; yes where nobody can be asked."""


class PlainDisplay(Display):
    """For logs and pipes: the job's own lines as they come, nothing else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def state(self, text: str) -> None:
        print(f"fsdpplan: {log_line(text)}", file=self._stream, flush=True)

    def output(self, line: str) -> None:
        print(log_line(line), file=self._stream, flush=True)

    def progress(self, measured: Measured) -> None:
        """Nothing: the job prints a line for each step."""

    def confirms(self, question: str) -> bool:
        """Yes: nobody reads the question."""
        return True


class LiveDisplay(Display):
    """For a person: one moving line, and above it whatever is not a step."""

    def __init__(self, *, planned_mfu_fraction: float | None = None) -> None:
        self._progress = _progress_line()
        self._task: TaskID | None = None
        self._planned_mfu_fraction = planned_mfu_fraction

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
                log_line(line), markup=False, highlight=False, emoji=False, soft_wrap=True
            )

    def progress(self, measured: Measured) -> None:
        if not measured.steps:
            return
        total = measured.start.steps if measured.start else None
        if self._task is None:
            # Not before: its thread must not be there when the job is forked off.
            self._progress.start()
            self._task = self._progress.add_task("", total=total)
        width = self._progress.console.width - 1
        words = step_words(measured, planned_mfu_fraction=self._planned_mfu_fraction, width=width)
        done = measured.last_step
        self._progress.update(self._task, completed=done, total=total, description=words)

    def confirms(self, question: str) -> bool:
        """Ask at the terminal; a second Ctrl-C is a yes, too."""
        if not sys.stdin.isatty():
            return True
        self._progress.stop()
        # Not as input's prompt, which may go to stdout, where the results are.
        print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
        try:
            answer = input()
        except (EOFError, KeyboardInterrupt):
            answer = ""
        if self._task is not None:
            self._progress.start()
        return answer.strip().lower() not in ("n", "no")


def display_for(stream: TextIO, *, planned_mfu_fraction: float | None = None) -> Display:
    """A moving line where a person looks, plain lines otherwise."""
    if may_move(stream.isatty(), os.environ):
        return LiveDisplay(planned_mfu_fraction=planned_mfu_fraction)
    return PlainDisplay(stream)


def step_words(
    measured: Measured, *, planned_mfu_fraction: float | None = None, width: int | None = None
) -> str:
    """The last step in a few words, its MFU beside the plan's, and the time that is left; on a
    narrow screen without what matters least."""
    last = measured.steps[-1]
    total = measured.start.steps if measured.start else None
    parts = {"step": f"step {last.step}" + ("" if total is None else f"/{total}")}
    if last.loss is not None:
        parts["loss"] = f"loss {last.loss:.3f}"
    if last.step_seconds is not None:
        parts["seconds"] = format_seconds(last.step_seconds)
    if last.mfu_fraction is not None:
        parts["mfu"] = mfu_words(last.mfu_fraction, planned_mfu_fraction)
    if left := measured.left_seconds:
        parts["left"] = f"{format_seconds(left)} left"
    for name in ("seconds", "loss", "mfu"):
        if width is not None and len("  ".join(parts.values())) > width:
            parts.pop(name, None)
    return "  ".join(parts.values())


def mfu_words(mfu_fraction: float, planned_mfu_fraction: float | None) -> str:
    """`MFU 41 % (plan 43 %)`."""
    plan = "" if planned_mfu_fraction is None else f" (plan {format_percent(planned_mfu_fraction)})"
    return f"MFU {format_percent(mfu_fraction)}{plan}"


def _progress_line() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        console=Console(stderr=True),
    )
