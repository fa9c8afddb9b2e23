"""What a person sees while a machine is measured, on stderr."""

from __future__ import annotations

import re
from typing import TextIO

from fsdpplan.run.follow.show import Display, LiveDisplay, PlainDisplay

SAID = "measure: "
"""Begins every line of the measuring program; torchrun's own stay in the file."""
_DONE = re.compile(rf"(?:\d+: )?{SAID}(?P<done>\d+)/(?P<all>\d+) (?P<what>.+)")
_REFUSED = re.compile("srun: (?:error|fatal): ")
_SAID = re.compile(rf"(?:\d+: )?{SAID}(?P<text>.+)")


class PlainMeasuring(PlainDisplay):
    """For logs and pipes: the program's lines as they come."""

    def output(self, line: str) -> None:
        if said := _SAID.fullmatch(line):
            self.state(said["text"])


class LiveMeasuring(LiveDisplay):
    """For a person: one moving line, and above it whatever is no result."""

    def output(self, line: str) -> None:
        if done := _DONE.fullmatch(line):
            self._show(int(done["done"]), int(done["all"]), done["what"])
        elif said := _SAID.fullmatch(line):
            super().output(f"fsdpplan: {said['text']}")

    def state(self, text: str) -> None:
        super().output(f"fsdpplan: {text}")

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
