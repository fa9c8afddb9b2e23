"""What a person sees while a machine is measured, on stderr."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from fsdpplan.run.metrics import Measured
from fsdpplan.run.show import Display

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SAID = "measure: "
"""Begins every line of the measuring program; torchrun's own stay in the file."""
_DONE = re.compile(rf"(?:\d+: )?{SAID}(?P<done>\d+)/(?P<all>\d+) (?P<what>.+)")
_REFUSED = re.compile("srun: (?:error|fatal): ")
_SAID = re.compile(rf"(?:\d+: )?{SAID}(?P<text>.+)")


class PlainMeasuring(Display):
    """For logs and pipes: the program's lines as they come."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def state(self, text: str) -> None:
        print(f"fsdpplan: {text}", file=self._stream, flush=True)

    def output(self, line: str) -> None:
        if said := _SAID.fullmatch(line):
            self.state(said["text"])

    def progress(self, measured: Measured) -> None:
        """Nothing: there are no steps."""


class LiveMeasuring(Display):
    """For a person: one moving line, and above it whatever is no result."""

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
        self._progress.console.print(
            f"fsdpplan: {text}", markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def output(self, line: str) -> None:
        if done := _DONE.fullmatch(line):
            self._show(int(done["done"]), int(done["all"]), done["what"])
        elif said := _SAID.fullmatch(line):
            self.state(said["text"])

    def progress(self, measured: Measured) -> None:
        """Nothing: there are no steps."""

    def _show(self, done: int, total: int, what: str) -> None:
        if self._task is None:
            # Not before: its thread must not be there when the program is forked off.
            self._progress.start()
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=done, total=total, description=what)


def measuring_display(stream: TextIO) -> Display:
    """A moving line where a person looks, plain lines otherwise."""
    return LiveMeasuring() if stream.isatty() else PlainMeasuring(stream)


def reason_in(console: str) -> str | None:
    """What the program printed about a failure: the last thing that it said beside results, or
    what srun refused."""
    lines = console.splitlines()
    said = [
        match["text"]
        for line in lines
        if (match := _SAID.fullmatch(line)) and not _DONE.fullmatch(line)
    ]
    refused = [line for line in lines if _REFUSED.match(line)]
    return next(reversed(said or refused), None)


def _progress_line() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
    )
