"""What the times of many steps say: ranks that hold the others back, and steps that grow longer."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

STRAGGLER_STEPS = 20
"""Steps that are looked at together."""
STRAGGLER_SHARE = 0.8
"""Share of them in which a straggler is the slow one."""
STRAGGLER_FACTOR = 1.2
"""Its time over that of its peers."""
DRIFT_STEPS = 50
DRIFT_FRACTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that its peers wait for."""

    rank: int
    factor: float
    """Its own work over that of its peers, by the median step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Steps have become longer."""

    first_seconds: float
    """Median of the first steps."""
    last_seconds: float
    """Median of the newest ones."""


class StragglerWatch:
    """Looks for ranks that are slow in most steps of a window; names each once.

    It is given the seconds of each rank's own work. Ranks of another group of `peers` have other
    work, as the stages of a pipeline have, and are not compared.
    """

    def __init__(self, peers: Sequence[Sequence[int]]) -> None:
        self._peers = [tuple(group) for group in peers if len(group) > 1]
        self._steps: deque[Sequence[float]] = deque(maxlen=STRAGGLER_STEPS)
        self._named: set[int] = set()

    def ended(self, own_seconds: Sequence[float]) -> list[Straggler]:
        """Add a step; the stragglers that were not named before."""
        self._steps.append(own_seconds)
        if len(self._steps) < STRAGGLER_STEPS:
            return []
        found = [one for group in self._peers for one in self._slow(group)]
        new = [one for one in found if one.rank not in self._named]
        self._named |= {one.rank for one in new}
        return new

    def _slow(self, group: tuple[int, ...]) -> list[Straggler]:
        found = []
        for rank in group:
            factors = [_factor(step, rank, group) for step in self._steps]
            slow = sum(factor >= STRAGGLER_FACTOR for factor in factors)
            if slow >= STRAGGLER_SHARE * len(factors):
                found.append(Straggler(rank=rank, factor=statistics.median(factors)))
        return found


def _factor(step: Sequence[float], rank: int, group: tuple[int, ...]) -> float:
    """The rank's time over the median of its peers; 1 where those took none."""
    usual = statistics.median_low(step[peer] for peer in group if peer != rank)
    return step[rank] / usual if usual > 0 else 1.0


class DriftWatch:
    """Compares the newest steps with the first ones; speaks once.

    The windows must be apart, too: the quarter of the newest steps that is shortest is longer than
    three quarters of the first ones, so that a few long steps are no drift.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=DRIFT_STEPS)
        self._has_spoken = False

    def ended(self, seconds: float) -> Drift | None:
        """Add a step after the warm-up."""
        if len(self._first) < DRIFT_STEPS:
            self._first.append(seconds)
            return None
        self._last.append(seconds)
        if self._has_spoken or len(self._last) < DRIFT_STEPS:
            return None
        first, last = statistics.median(self._first), statistics.median(self._last)
        shortest_quarter = statistics.quantiles(self._last, n=4)[0]
        three_quarters = statistics.quantiles(self._first, n=4)[2]
        if last <= first * (1 + DRIFT_FRACTION) or shortest_quarter <= three_quarters:
            return None
        self._has_spoken = True
        return Drift(first_seconds=first, last_seconds=last)
