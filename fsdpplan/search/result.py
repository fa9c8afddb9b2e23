"""What a search returns."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.search.learned import NextRun
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import RankedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """The layout that comes closest to fitting when none does."""

    layout: Layout
    needed_bytes: int
    """Device memory it needs, head-room not included."""
    available_bytes: int
    """The highest peak that is planned with, by head-room and chance to fit."""
    remedy: str
    """The cheapest change that would make a layout fit, as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The ranked list; all of it empty when nothing fits."""

    ranked: tuple[RankedLayout, ...] = ()
    """The best first: of all that are not told apart from the fastest, the one that an expert would
    try first (`order.Preference`). The fastest is among them."""
    tied: tuple[int, ...] = ()
    """Ranks of those beside the first that are not told apart from the fastest."""
    fastest_rank: int | None = None
    """Rank of the least expected step time of all that fits."""
    errors: tuple[float, ...] = ()
    """For each rank, the error of its difference from the fastest, as a share of the step."""
    next_run: NextRun | None = None
    """The row that is most worth running beside the first; None where no runs are known, or none
    is worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Ranked layouts and what was seen on the way."""

    listed: Listed
    """What is best, and why."""
    candidates: int
    """Layouts considered, legal or not."""
    feasible: int
    """Layouts that are legal and were found to fit."""
    priced: int
    """Layouts whose step was predicted."""
    pruned: int
    """Layouts that a lower bound of their step left out before it was looked whether they fit."""
    rejected: tuple[tuple[str, int], ...]
    """(reason, number of layouts), largest first."""
    nearest_miss: NearestMiss | None
    """Set when nothing fits."""
    example: str | None = None
    """An illegal layout of the commonest kind: what is wrong with it, and what would be right."""

    @property
    def ranked(self) -> tuple[RankedLayout, ...]:
        """The ranked layouts, the best first."""
        return self.listed.ranked

    @property
    def fastest(self) -> RankedLayout | None:
        """The fastest of all that fits; None when nothing does."""
        rank = self.listed.fastest_rank
        return None if rank is None else self.listed.ranked[rank - 1]

    @property
    def fastest_seconds(self) -> float | None:
        """Its expected step."""
        return None if self.fastest is None else self.fastest.estimate.step_seconds.expected

    def behind_fastest(self, ranked: RankedLayout) -> float:
        """By how much of the fastest step `ranked`, one of the list, is slower than it."""
        assert self.fastest_seconds is not None
        return ranked.estimate.step_seconds.expected / self.fastest_seconds - 1
