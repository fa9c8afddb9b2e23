"""Signals that ask for an orderly end: finish the step, save, leave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers and torchrun send before they kill."""

STOPPED_VARIABLE = "FSDPPLAN_STOPPED_FILE"
"""Names a file of this node in which a run that a signal has ended notes its number: the signal may
have come to another node, and the exit code is 0."""


class StopRequest:
    """Remembers that this rank was asked to stop.

    It may be asked more than once (a scheduler signals torchrun and the ranks, and torchrun signals
    the ranks, too), so later signals change nothing.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal, or 0."""
        self._ends = ""
        """What a signal ends at once; empty: nothing."""

    def listen(self) -> None:
        """Take the signals over from their defaults.

        Python allows that to the main thread alone: whoever trains in another one (Ray's workers)
        has signals of its own.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        if self._ends:
            raise Stopped(number, self._ends)

    @contextmanager
    def ends(self, what: str) -> Iterator[None]:
        """Meanwhile a signal raises Stopped: that `what` is done takes long, and can be undone."""
        self._ends = what
        try:
            if self.number:
                raise Stopped(self.number, what)
            yield
        finally:
            self._ends = ""


def note_stop(number: int) -> None:
    """Note that signal `number` has ended the run before its last step, once a node."""
    path = os.environ.get(STOPPED_VARIABLE)
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).write_text(f"{number}\n", encoding="utf-8")
