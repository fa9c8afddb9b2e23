"""Frontier: the layouts of a search, best first, each looked at no closer than it must be.

Every way to spread the ranks is a group. Its next step is always that of its most promising part:

    a bound that many share -> one of each micro-batch -> its layouts, each with a bound -> what
    fits of it, with its own bound -> with the pipeline played -> with its step -> its estimate

Bounds only grow on this way, so what is estimated before a bound passes it is faster. Nothing is
lost: what is left out has a bound above what was asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import inf

from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION
from fsdpplan.search.bounds.fitting import Fitting
from fsdpplan.search.enumerate import Degrees
from fsdpplan.search.order import COMPARED, Entry, seconds
from fsdpplan.search.space import Space, entry_of
from fsdpplan.spec.layout import Layout

REACH = 1 + MOST_INDISTINGUISHABLE_FRACTION
"""A layout that takes more than this times the fastest is never preferred to it."""


class Known(IntEnum):
    """What is known of a layout, before its estimate."""

    SIZE = 0
    """It stands for all with its micro-batch."""
    LEGAL = 1
    """It may fit with some recomputation; its bound is over all of them."""
    FITS = 2
    """Its bound is its own."""
    PLAYED = 3
    """The same, by playing the schedule of a pipeline."""
    SHARP = 4
    """What its step takes."""


@dataclass(frozen=True, slots=True, order=True)
class Promise:
    """A layout and the least that it can take."""

    floor: float
    """Lower bound of the step, in seconds."""
    known: Known
    layout: Layout = field(compare=False)


@dataclass(slots=True)
class Group:
    """The layouts of one way to spread the ranks; private to one search."""

    degrees: Degrees
    least: float
    """The least seconds of all of them, whatever their settings."""
    found: Fitting | None = None
    """None: its layouts are not looked at yet."""
    promises: list[Promise] = field(default_factory=list)
    """Not priced yet: a heap, the most promising first."""
    entries: list[Entry] = field(default_factory=list)
    """Priced."""

    @property
    def floor(self) -> float:
        """The least seconds of what is not priced yet."""
        if self.found is None:
            return self.least
        return self.promises[0].floor if self.promises else inf

    @property
    def best(self) -> float:
        """The fastest that is priced."""
        return min(map(seconds, self.entries), default=inf)

    @property
    def sizes(self) -> set[int]:
        """Micro-batches with which something may fit, or does."""
        priced = {layout.micro_batch for layout, _ in self.entries}
        return priced | {promise.layout.micro_batch for promise in self.promises}

    @property
    def is_spare(self) -> bool:
        """Whether its state is on the host."""
        return self.degrees.offload != "none"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of `COMPARED` to which all of its layouts belong."""
        return tuple(kind for kind, is_of_kind in COMPARED.items() if is_of_kind(self.degrees))


@dataclass(slots=True)
class Frontier:
    """All groups of one search."""

    space: Space
    groups: list[Group] = field(init=False)

    def __post_init__(self) -> None:
        floors = self.space.floors
        self.groups = [Group(d, floors.at_first_sight(d)) for d in self.space.spreads()]

    def price_listed(self, limit: int) -> list[Group]:
        """The groups that may be listed, each with its fastest layout priced.

        Beyond the reach of the `limit`-th fastest group nothing can be listed, but for the best of
        each kind of `COMPARED`. State on the host is what nobody prefers: as long as the fastest
        has none there, such a group is only looked at to be faster than it.
        """
        best: dict[int, float] = {}
        of_kinds = dict.fromkeys(COMPARED, inf)
        bound = fastest = inf
        spare_leads = False
        heap = [(group.floor, index) for index, group in enumerate(self.groups)]
        heapify(heap)
        while heap:
            floor, index = heappop(heap)
            group = self.groups[index]
            most = max([bound, *(of_kinds[kind] for kind in group.kinds)])
            if group.is_spare and not spare_leads:
                most = min(most, fastest)
            if floor == inf or floor > min(most, best.get(index, inf)):
                continue
            priced = len(group.entries)
            self.advance(group)
            if len(group.entries) > priced:
                best[index] = group.best
                ways = sorted(best.values())
                kth = ways[limit - 1] if len(ways) >= limit else inf
                spare_leads = group.is_spare if group.best < fastest else spare_leads
                fastest = ways[0]
                bound = max(kth, REACH * fastest)
                for kind in group.kinds:
                    of_kinds[kind] = min(of_kinds[kind], group.best)
            heappush(heap, (group.floor, index))
        return [self.groups[index] for index in best]

    def advance(self, group: Group) -> None:
        """One step of a group towards the estimate of its most promising layout."""
        if group.found is None:
            self._look_at(group)
            return
        promise = heappop(group.promises)
        if promise.known == Known.SHARP:
            group.entries.append(entry_of(self.space.asked, promise.layout))
        else:
            for closer in self.closer(group, promise):
                heappush(group.promises, closer)

    def _look_at(self, group: Group) -> None:
        floors, d = self.space.floors, group.degrees
        group.found = self.space.fitting(d)
        sizes, most = floors.sizes(d), floors.largest_size(d)
        possible = bisect_right(sizes, most)
        unfit = []
        for size in sizes[:possible]:
            layout = floors.plain(d, size)
            floor = floors.at_usual(layout)
            if floor < inf:
                heappush(group.promises, Promise(max(group.least, floor), Known.SIZE, layout))
            else:
                unfit.append(size)
        self.space.rule_out_sizes(d, (*unfit, *sizes[possible:]))

    def closer(self, group: Group, promise: Promise) -> Iterator[Promise]:
        """What one look more says of a promise that is not sharp."""
        floors, layout, known = self.space.floors, promise.layout, promise.known
        if known == Known.FITS and layout.pp > 1:
            yield Promise(max(promise.floor, floors.played(layout)), Known.PLAYED, layout)
            return
        if known >= Known.FITS:
            yield Promise(max(promise.floor, self.space.floor(layout)), Known.SHARP, layout)
            return
        found = group.found
        assert found is not None
        if known == Known.SIZE:
            for leaf in found.leaves(layout.micro_batch):
                floor = floors.of_usual(leaf, found.hopeful_modes(leaf))
                yield Promise(max(promise.floor, floor), Known.LEGAL, leaf)
            return
        for fits in self.space.settled(found, layout):
            yield Promise(max(promise.floor, floors.of_settled(fits)), Known.FITS, fits)

    def count_left_out(self) -> None:
        """Tell the tally of what was not looked at, or no closer than at its bound."""
        tally, asked = self.space.tally, self.space.asked
        self.space.count_unfit()
        for group in self.groups:
            if group.least == inf:
                self.space.rule_out_spread(group.degrees)
                continue
            if group.found is None:
                tally.prune(self.space.number(group.degrees))
                continue
            for promise in group.promises:
                if promise.known == Known.SIZE:
                    tally.prune(self.space.number_with(group.degrees, [promise.layout.micro_batch]))
                elif promise.known < Known.FITS:
                    tally.prune(len(asked.modes))
