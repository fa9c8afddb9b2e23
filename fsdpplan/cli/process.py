"""This program as a process: its streams and signals, from its first moment to its last.

Imported before all else that takes time, so it imports next to nothing.
"""

from __future__ import annotations

import io
import os
import signal
import sys

TYPE_CHECKING = False  # typing takes longer to import than all else before signals are heard
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

LEAVES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to end: Ctrl-C, `kill`, a terminal that is closed."""


before_output: Callable[[], None] | None = None
"""What is done before anything is written to standard output."""


class Left(KeyboardInterrupt):
    """A signal asked this program to end; what is half done is taken back on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class OutputFailed(Exception):
    """Standard output could not be written to; `cause` says why."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def exit_code_of_signal(error: KeyboardInterrupt) -> int:
    """What a shell shows for a program that this signal ended: 130 for Ctrl-C."""
    return 128 + (error.number if isinstance(error, Left) else signal.SIGINT)


def begin() -> None:
    """Make the streams whole, and end at once where a signal asks: nothing is under way yet."""
    _fill_streams()
    _hear(_end_at_once)


def go_on() -> None:
    """From here on there is something to take back, so a signal raises `Left`."""
    sys.unraisablehook = _unraisable
    if isinstance(sys.stdout, io.TextIOWrapper):
        buffer, own = sys.stdout.buffer, sys.stdout.line_buffering
        if isinstance(
            buffer, io.RawIOBase
        ):  # PYTHONUNBUFFERED: half a write would pass for a whole
            buffer, own = io.BufferedWriter(buffer), True
        sys.stdout = _Output(
            buffer,
            encoding=sys.stdout.encoding,
            # A name from somebody's file must not end the program on an ASCII terminal.
            errors="backslashreplace",
            line_buffering=own,
        )
    _hear(_raise)


def be_deaf() -> None:
    """All is done: a signal would only interrupt Python's way out."""
    _hear(signal.SIG_IGN)


def _hear(handler: Any) -> None:
    for number in LEAVES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, handler)


def _end_at_once(number: int, _frame: FrameType | None) -> NoReturn:
    try:
        os.write(2, b"interrupted\n" if number == signal.SIGINT else b"terminated\n")
    finally:
        os._exit(128 + number)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise Left(number)


def _unraisable(unraisable: Any) -> None:
    """A signal may come where Python can raise nothing, as in a finalizer: it must not be lost."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _end_at_once(exit_code_of_signal(unraisable.exc_value) - 128, None)
    sys.__unraisablehook__(unraisable)


def _fill_streams() -> None:
    """A stream that was closed, as by `>&-`, is /dev/null: its number would be that of the next
    file that is opened, and what is said would go into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115


class _Output(io.TextIOWrapper):
    """Standard output, whose failures are told from those of files, and which passes nothing on
    that would move a terminal."""

    def write(self, text: str) -> int:
        """Write `text`."""
        from fsdpplan.emit.safe_text import harmless  # its patterns take longer than all else here

        if before_output is not None:
            before_output()
        try:
            return super().write(harmless(text))
        except OSError as error:
            raise OutputFailed(error) from error

    def flush(self) -> None:
        """Hand on what was written."""
        try:
            super().flush()
        except OSError as error:
            raise OutputFailed(error) from error
