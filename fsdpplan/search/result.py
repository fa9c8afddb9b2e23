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
    """Fastest first; empty when nothing fits."""
    candidates: int
    """Layouts considered, legal or not."""
    feasible: int
    """Layouts that are legal and fit."""
    rejected: tuple[tuple[str, int], ...]
    """(reason, number of layouts), largest first."""
    nearest_miss: NearestMiss | None
    """Set when nothing fits."""

    @property
    def best_runnable(self) -> RankedLayout | None:
        """The first layout that today's trainer runs."""
        return next((r for r in self.ranked if r.estimate.runnable), None)
