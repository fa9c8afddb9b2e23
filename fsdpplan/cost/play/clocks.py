"""Clocks: a program played, stream by stream.

An operation begins when its stream is free and what it waits for is over. What the compute stream
waits is exposed, by the cause that the wait names.

What is done many times settles: from some time on, each time every clock advances by what it
advanced the time before, until one wait outlasts another that it did not outlast so far. Until then
nothing is played, and all clocks are moved at once; when that is, follows from by how much each
wait is outlasted, and how that changes from time to time.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import sub
from typing import NamedTuple, get_args

from fsdpplan.cost.step.program import Cause, Name, Op, Program, Run, Stream

SETTLED = 1e-12
"""Clocks that advance alike differ by rounding: by less than this share of the time played."""

LAST_BUT_ONE: tuple[Name, ...] = ("copy_out", "forward")
"""Operations of which the last but one may be waited for."""

_FIRST_TO_SETTLE = 3
"""Two times show by how much the clocks advance, a third that they go on so."""


class Clocks:
    """Where the streams of a rank are, from 0 on."""

    def __init__(self) -> None:
        names = (*get_args(Stream), *get_args(Name))
        self.last: dict[Stream | Name, float] = dict.fromkeys(names, 0.0)
        """When each stream's last operation ends, and the last one of each name."""
        self.before: dict[Stream | Name, float] = dict.fromkeys(LAST_BUT_ONE, 0.0)
        """When the last but one ends, of those names that are asked for it."""
        self.waited: dict[Cause, float] = dict.fromkeys(get_args(Cause), 0.0)
        """What the compute stream has waited."""
        self._margins: list[float] = []

    @property
    def compute(self) -> float:
        """When the compute stream ends."""
        return self.last["compute"]

    def do(self, *ops: Op) -> None:
        """The next operations."""
        last, before, waited, note = self.last, self.before, self.waited, self._margins.append
        for name, stream, seconds, after, _, holds in ops:
            begin = last[stream]
            for held in holds:
                note(last[held] - begin)
                begin = max(begin, last[held])
            for on, cause, back in after:
                moment = before[on] if back else last[on]
                margin = moment - begin
                note(margin)
                if margin > 0:
                    begin = moment
                    if stream == "compute":
                        waited[cause] += margin
            if name in before:
                before[name] = last[name]
            last[name] = last[stream] = end = begin + seconds
            for held in holds:
                last[held] = end

    def play(self, program: Program) -> None:
        """All of it."""
        for part in program:
            for _ in (0,) if part.times == 1 else self.rounds(part.times):
                if isinstance(part, Run):
                    self.do(*part.ops)
                else:
                    self.play(part.of)

    def rounds(self, times: int) -> Iterator[int]:
        """The numbers of those of `times` alike rounds that are to be played, each before the next
        is asked for. What is left out went as the round before it."""
        if times <= _FIRST_TO_SETTLE:
            yield from range(times)
            return
        number, outer = 0, self._margins
        advanced, margins = list[float](), list[float]()
        end = self._moments()
        while number < times:
            self._margins = []
            yield number
            number += 1
            start, end = end, self._moments()
            before, margins = margins, self._margins
            outer += margins
            previous, advanced = advanced, list(map(sub, end, start))
            if len(before) == len(margins) and self._are_equal(previous, advanced):
                alike = self._alike(before, margins, times - number)
                if alike:
                    self._advance(advanced, alike)
                    changes = zip(before, margins, strict=True)
                    outer += [now + alike * (now - then) for then, now in changes]
                    number, advanced, end = number + alike, [], self._moments()
        self._margins = outer

    def _moments(self) -> list[float]:
        return [*self.last.values(), *self.before.values(), *self.waited.values()]

    def _are_equal(self, some: list[float], others: list[float]) -> bool:
        return bool(some) and max(map(abs, map(sub, some, others))) <= SETTLED * self.compute

    def _alike(self, before: list[float], now: list[float], most: int) -> int:
        """How many more rounds, at `most`, go like the last two: none changes which of two moments
        is the later one."""
        noise = SETTLED * self.compute
        for a, b in zip(before, now, strict=True):
            if (a > 0) != (b > 0):
                return 0
            change = b - a
            if abs(change) > noise and (change < 0) == (b > 0):
                most = min(most, int(-b / change))
        return most

    def _advance(self, by: list[float], times: int) -> None:
        each = iter(by)
        for moments in (self.last, self.before, self.waited):
            for name in moments:
                moments[name] += times * next(each)  # type: ignore[index]


class Played(NamedTuple):
    """What is read off a program that was played."""

    seconds: float
    """When the compute stream ends."""
    waited: dict[Cause, float]
    """What it has waited for, in seconds."""

    @property
    def exposed(self) -> float:
        """All that it has waited."""
        return sum(self.waited.values())


def played(program: Program) -> Played:
    """A program played from 0 on."""
    clocks = Clocks()
    clocks.play(program)
    return Played(clocks.compute, clocks.waited)
