"""What a person sees on stderr while a command computes or waits, once that takes long.

Every command is watched from its beginning to its first word on stdout, but for those that have a
display of their own, so that none can forget it. What it is at is said by `say`. On a terminal
that is one line, written over and taken away before anything else is; elsewhere, and for `NO_COLOR`
or `TERM=dumb`, whole lines, few of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from threading import Event, RLock, Thread
from typing import Any, TextIO

from fsdpplan.cli import process
from fsdpplan.emit.safe_text import may_move, printable

QUIET_SECONDS = 1.0
"""So long nothing is said of what goes on."""

TICK_SECONDS = 1.0
"""Between two looks at a line that moves."""

LINES_SECONDS = 5.0
"""Between two lines where nothing moves, if there is something new."""

STILL_SECONDS = 60.0
"""And if there is not."""


class _Watch:
    """One command at work."""

    def __init__(self, words: str, stream: TextIO) -> None:
        self._words = words
        self._stream = stream
        self._moves = may_move(stream.isatty(), os.environ)
        self._began = time.monotonic()
        self._lock = RLock()
        self._over = Event()
        self._shown = ""
        """The line that stands on the terminal, or the words of the last line that was written."""
        self._shown_at = self._began
        self._thread = Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Show nothing any more; afterwards a process may be forked."""
        self._over.set()
        self.hide()
        self._thread.join(TICK_SECONDS)

    def say(self, words: str) -> None:
        """What it is at now."""
        with self._lock:
            self._words = words
            self._show()

    def hide(self) -> None:
        """Take the moving line away."""
        with self._lock:
            if self._moves and self._shown:
                self._write(f"\r{' ' * len(self._shown)}\r")
                self._shown = ""

    def _run(self) -> None:
        self._over.wait(QUIET_SECONDS)
        while not self._over.is_set():
            self._show()
            self._over.wait(TICK_SECONDS)

    def _show(self) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._words or self._over.is_set() or now - self._began < QUIET_SECONDS:
                return
            if self._moves:
                line = self._line(now - self._began)
                self._write(f"\r{line:<{len(self._shown)}}")
                self._shown = line
                return
            if self._shown:
                is_new = self._words != self._shown
                if now - self._shown_at < (LINES_SECONDS if is_new else STILL_SECONDS):
                    return
            self._shown, self._shown_at = self._words, now
            self._write(f"fsdpplan: {printable(self._words)}\n")

    def _line(self, seconds: float) -> str:
        """What fits in one row: the terminal would break a longer one, and keep it."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        time_words = f" ({seconds:.0f} s)"
        room = max(20, (columns or 80) - 1 - len(time_words))
        words = printable(f"fsdpplan: {self._words}")
        if len(words) > room:
            words = f"{words[: room - 3]}..."
        return words + time_words

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody looks any more
            self._stream.write(text)
            self._stream.flush()


_now: _Watch | None = None


@contextmanager
def watched(words: str) -> Iterator[None]:
    """Say what is done inside once it takes long, beginning with `words`."""
    global _now
    if _now is not None or sys.stderr is None:
        yield
        return
    _now = watch = _Watch(words, sys.stderr)
    process.before_output = stop
    watch.start()
    try:
        yield
    finally:
        watch.stop()
        _now, process.before_output = None, None


def watching(function: Callable[..., None], words: str) -> Callable[..., None]:
    """`function`, watched."""

    @wraps(function)
    def command(*of: Any, **named: Any) -> None:
        with watched(words):
            function(*of, **named)

    return command


def say(words: str) -> None:
    """Tell what is searched, read or waited for now."""
    if _now is not None:
        _now.say(words)


def hide() -> None:
    """Take away what moves, before something else is written on stderr."""
    if _now is not None:
        _now.hide()


def stop() -> None:
    """Say nothing more: the answer begins."""
    if _now is not None:
        _now.stop()
