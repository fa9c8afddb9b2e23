"""Signals that ask for an orderly end: finish the step, save, leave."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers and torchrun send before they kill."""


class StopRequest:
    """Remembers that this rank was asked to stop.

    It may be asked more than once (a scheduler signals torchrun and the ranks, and torchrun signals
    the ranks, too), so later signals change nothing.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal, or 0."""

    def listen(self) -> None:
        """Take the signals over from their defaults."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
