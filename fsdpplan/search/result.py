"""What a search returns."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import RankedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """The layout that comes closest to fitting when none does."""

    layout: Layout
    needed_bytes: int
    """Device memory it needs, head-room not included."""
    available_bytes: int
    """Device memory less head-room."""
    remedy: str
    """The cheapest change that would make a layout fit, as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Ranked layouts and what was seen on the way."""

    ranked: tuple[RankedLayout, ...]
    """The best first: the fastest, or one that is not told apart from it and leaves more head-room.
    Empty when nothing fits."""
    tied: tuple[int, ...] = ()
    """Ranks of those that are not told apart from the first."""
    fastest_seconds: float | None = None
    """Least expected step time of all that fits; the first may be slower by what cannot be told
    apart. None when nothing fits."""
    candidates: int
    """Layouts considered, legal or not."""
    feasible: int
    """Layouts that are legal and fit."""
    rejected: tuple[tuple[str, int], ...]
    """(reason, number of layouts), largest first."""
    nearest_miss: NearestMiss | None
    """Set when nothing fits."""
    example: str | None = None
    """An illegal layout of the commonest kind: what is wrong with it, and what would be right."""
