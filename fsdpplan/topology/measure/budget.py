"""Budget: which measurements there is time for, and how often each is repeated.

All ranks come to the same decisions, since all that they are made of was agreed upon.
"""

from __future__ import annotations

from dataclasses import dataclass

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
