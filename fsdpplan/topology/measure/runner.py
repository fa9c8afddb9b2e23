"""The runner: measures cells while there is time, a few of everything first.

All ranks come to the same decisions on what there is time for, and how often each is repeated,
since all that they are made of was agreed upon.

Cell: one thing to measure, told to a runner that knows nothing of what it is.

The log: one JSON object a row, on disk as soon as it is known.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdpplan.errors import LaunchError
from fsdpplan.spec.measurement import Measurement
from fsdpplan.topology.measure.clock import Call, clock_of, host_clock_of
from fsdpplan.topology.measure.ranks import Ranks
from fsdpplan.units import format_seconds

Seconds = list[list[float]]
"""Of each repeat, for each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One thing to measure, on all ranks at the same time."""

    name: str
    """For a person."""
    series: str
    """Cells of one series take time in proportion to their work, small ones apart."""
    work: float
    needed_bytes: int
    """Memory of one rank."""
    prepare: Callable[[], Call]
    """Makes what the call needs. It talks to nobody, and may fail for want of memory."""
    rows: Callable[[Seconds], Iterable[Measurement]]
    """What to log."""
    is_coarse: bool = False
    """To be measured before all that is not."""
    is_aligned: bool = False
    """Ranks wait for each other before each repeat."""
    by_host: bool = False
    """The time is the host's, not the device's."""
    lasts: bool = False
    """Repeated for seconds without a pause, to see what the device sustains."""


DIGITS = 6
"""Of seconds: the clocks are no better."""


def row_document(row: Measurement) -> dict[str, Any]:
    """`row` as the log has it: `kind` (MeasuredMatmul is `matmul`), then its fields."""
    document = {"kind": type(row).__name__.removeprefix("Measured").lower(), **asdict(row)}
    if "seconds" in document:
        document["seconds"] = [float(f"{one:.{DIGITS}g}") for one in document["seconds"]]
    return document


class Log:
    """A log being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.write_text("", encoding="utf-8")
        except OSError as error:
            raise LaunchError(
                f"the log {path} cannot be written: {error.strerror}: choose a folder that every "
                "node sees and you may write to"
            ) from error

    def write(self, row: Measurement) -> None:
        """Append a row; a process that is ended here leaves at most one line cut short."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row_document(row)) + "\n")


COARSE_FRACTION = 0.2
"""Share of the time in which something of everything is to be measured."""
WARM_UPS = 2
FEWEST, MOST = 3, 30
"""Repeats that count."""
OVERDRAFT = 3.0
"""A measurement may take so many times its fair share: shares that small ones leave are many."""
EXTRAPOLATE_ABOVE_SECONDS = 2e-3
"""A call that takes longer is taken to grow in proportion to its work: what a call costs at any
size is far below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What one call of a series took."""

    work: float
    seconds: float


def expected_seconds(known: Known | None, work: float) -> float:
    """Time of a call of `work`, as far as that can be said from a smaller one of its series."""
    if known is None or known.seconds < EXTRAPOLATE_ABOVE_SECONDS:
        return 0.0
    return known.seconds * work / known.work


def share_seconds(*, elapsed: float, until: float, left: int) -> float:
    """Fair share of the time until `until` for each of `left` measurements."""
    return max(0.0, until - elapsed) / max(1, left)


def is_affordable(once: float, *, share: float) -> bool:
    """Whether the fewest repeats of a call of `once` seconds fit."""
    return (WARM_UPS + FEWEST) * once <= OVERDRAFT * share


def repeats(once: float, *, share: float) -> int:
    """How often to repeat a call of `once` seconds."""
    if once <= 0:
        return MOST
    return int(min(MOST, max(FEWEST, share / once)))


LASTING_SECONDS, LASTING_FRACTION = 5.0, 0.08
"""How long a cell that lasts goes on, and at most which share of all time."""
MOST_LASTING = 20_000
"""Most repeats of a cell that lasts, all of which are logged."""
NAMED = 4
"""Cells to name where several are left out."""


class Runner:
    """Measures cells; every rank has one and all do the same."""

    def __init__(self, *, ranks: Ranks, log: Log | None, seconds: float, began: float) -> None:
        self._ranks, self._log = ranks, log
        self._seconds, self._began = seconds, began
        self._device_clock = clock_of(ranks.device)
        self._host_clock = host_clock_of(ranks.device)
        self._known: dict[str, Known] = {}
        self._done = self._all = 0

    def run(self, cells: Sequence[Cell], *, room_bytes: float) -> None:
        """Measure `cells` in order, the coarse ones first; those that need more than `room_bytes`
        are left out."""
        fitting = [cell for cell in cells if cell.needed_bytes <= room_bytes]
        too_large = [cell for cell in cells if cell.needed_bytes > room_bytes]
        self._say_left_out(too_large, "they need more memory than is free")
        self._all = len(fitting)
        elapsed = self._elapsed()
        coarse_until = elapsed + COARSE_FRACTION * max(0.0, self._seconds - elapsed)
        put_off = self._pass([cell for cell in fitting if cell.is_coarse], until=coarse_until)
        rest = [cell for cell in fitting if not cell.is_coarse]
        left_out = [*rest, *put_off]
        tried = 0
        while len(left_out) != tried:  # what others leave may suffice for more
            tried = len(left_out)
            left_out = self._pass(left_out, until=self._seconds)
        self._say_left_out(left_out, f"they do not fit into {self._seconds:g} s")

    def say(self, text: str) -> None:
        """One line on stderr, from one rank."""
        if self._ranks.rank == 0:
            print(f"measure: {text}", file=sys.stderr, flush=True)

    def _say_left_out(self, cells: Sequence[Cell], reason: str) -> None:
        if cells:
            more = ", ..." if len(cells) > NAMED else ""
            named = ", ".join(cell.name for cell in cells[:NAMED])
            self.say(f"{len(cells)} are not measured, since {reason}: {named}{more}")

    def _pass(self, cells: Sequence[Cell], *, until: float) -> list[Cell]:
        """Measure what there is time for; the cells that were left out."""
        left_out = []
        for index, cell in enumerate(cells):
            elapsed = self._elapsed()
            share = share_seconds(elapsed=elapsed, until=until, left=len(cells) - index)
            expected = expected_seconds(self._known.get(cell.series), cell.work)
            if elapsed >= self._seconds or not is_affordable(expected, share=share):
                left_out.append(cell)
            else:
                self._measure(cell, share=share, left=self._seconds - elapsed)
        return left_out

    def _elapsed(self) -> float:
        """Seconds since the start, the same on all ranks."""
        return self._ranks.largest(time.monotonic() - self._began)[0]

    def _measure(self, cell: Cell, *, share: float, left: float) -> None:
        self._done += 1
        call = self._prepared(cell)
        if call is None:
            return
        once = self._once(cell, call, left=left)
        if FEWEST * once > left:
            self.say(f"{cell.name} is not measured: {format_seconds(once)} each is too long")
            return
        own = self._lasting(call, once) if cell.lasts else self._repeated(cell, call, once, share)
        seconds = self._ranks.gathered(own)
        for row in cell.rows(seconds):
            if self._log is not None:
                self._log.write(row)
        middle = max(statistics.median(one) for one in seconds)
        known = self._known.get(cell.series)
        if known is None or known.work <= cell.work:
            self._known[cell.series] = Known(work=cell.work, seconds=middle)
        self.say(f"{self._done}/{self._all} {cell.name}: {format_seconds(middle)}")

    def _prepared(self, cell: Cell) -> Call | None:
        """The call, or None where some rank cannot make it."""
        call, reason = None, ""
        try:
            call = cell.prepare()
        except (RuntimeError, ValueError, MemoryError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        rank = self._ranks.rank
        (failed,) = self._ranks.largest(float(self._ranks.world - rank if call is None else 0))
        if failed and rank == self._ranks.world - failed:  # the first of those that cannot
            print(
                f"measure: {cell.name} is not measured: rank {rank} says {reason}",
                file=sys.stderr,
                flush=True,
            )
        return None if failed else call

    def _once(self, cell: Cell, call: Call, *, left: float) -> float:
        """Seconds of one call, warm if there is time for that; the same on all ranks."""
        once = 0.0
        for _ in range(WARM_UPS):
            clock = self._host_clock if cell.by_host else self._device_clock
            (once,) = self._ranks.largest(*clock.repeats(call, count=1, align=self._align(cell)))
            if FEWEST * once > left:
                break
        return once

    def _repeated(self, cell: Cell, call: Call, once: float, share: float) -> list[float]:
        clock = self._host_clock if cell.by_host else self._device_clock
        count = repeats(once, share=share)
        return clock.repeats(call, count=count, align=self._align(cell))

    def _lasting(self, call: Call, once: float) -> list[float]:
        seconds = min(LASTING_SECONDS, LASTING_FRACTION * self._seconds)
        count = int(max(FEWEST, min(MOST_LASTING, seconds / max(once, 1e-9))))
        return self._device_clock.run(call, count=count)

    def _align(self, cell: Cell) -> Call:
        return self._ranks.align if cell.is_aligned else lambda: None
