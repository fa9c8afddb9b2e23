"""Pricing: as few estimates as find the same layouts that pricing everything would.

A layout is only priced while its lower bound does not rule it out: against the fastest of its own
way to spread the ranks for a place in the list, and against the fastest of all, with the reach of
an error, for the first place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import inf

from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION
from fsdpplan.cost.step import least_seconds
from fsdpplan.search.enumerate import Degrees
from fsdpplan.search.fitting import number_of_layouts
from fsdpplan.search.order import Difference, Entry, by_time, is_tied, seconds, simplicity
from fsdpplan.search.question import Question
from fsdpplan.search.refine import refined
from fsdpplan.search.space import Space, entry_of
from fsdpplan.spec.layout import Layout

REACH = 1 + MOST_INDISTINGUISHABLE_FRACTION
"""A layout that takes more than this times the fastest is never preferred to it."""


@dataclass(frozen=True, slots=True, order=True)
class Promise:
    """A layout and the least that it can take."""

    floor: float
    """Lower bound of the step, in seconds."""
    is_sharp: bool
    """The costlier bounds are in: they take a tenth of an estimate."""
    layout: Layout = field(compare=False)


def promise(asked: Question, layout: Layout) -> Promise:
    """The bound by compute."""
    least = least_seconds(
        model=asked.model, cluster=asked.cluster, training=asked.training, layout=layout
    )
    return Promise(least, False, layout)


def _sharpened(space: Space, promise: Promise) -> Promise:
    """The step itself without a pipeline; the bound by the way through one, and the update."""
    return Promise(max(promise.floor, space.floor(promise.layout)), True, promise.layout)


@dataclass(slots=True)
class Group:
    """The layouts of one way to spread the ranks; private to one search."""

    degrees: Degrees
    least: float
    """The least seconds of all of them, before it was looked for what fits."""
    promises: list[Promise] | None = None
    """Not priced yet: a heap, the most promising first. None: not looked for."""
    entries: list[Entry] = field(default_factory=list)
    """Priced."""

    @property
    def floor(self) -> float:
        """The least seconds of what is not priced yet."""
        if self.promises is None:
            return self.least
        return self.promises[0].floor if self.promises else inf

    @property
    def best(self) -> float:
        """The fastest that is priced."""
        return min(map(seconds, self.entries), default=inf)

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank computes whole layers of its own sequences."""
        return self.degrees.tp == self.degrees.pp == self.degrees.cp == 1


def priced(space: Space, limit: int, difference: Difference) -> list[Entry]:
    """All layouts that the first place may go to, and of each group that may be listed the fastest
    with the usual settings.

    The first place goes to a layout within reach of the fastest; the best data-parallel layout is
    always listed.
    """
    listed = _listed(space, limit)
    fastest = {min(group.entries, key=by_time)[0] for group in listed}
    unpriced = [
        (one.floor, one.layout)
        for group in listed
        for one in group.promises or ()
        if one.layout.pp == 1  # the floor of a pipeline says too little
    ]
    usual = [entry for group in listed for entry in group.entries]
    refinements = refined(space, usual, unpriced)
    first = min((*usual, *refinements), key=by_time, default=None)
    if first is None:
        return []
    for group in listed:
        _price_preferred(space, group, first, difference)
    found = [*(entry for group in listed for entry in group.entries), *refinements]
    space.tally.priced = len(found)
    best = seconds(min(found, key=by_time))
    return [entry for entry in found if seconds(entry) <= REACH * best or entry[0] in fastest]


def _price_preferred(space: Space, group: Group, first: Entry, difference: Difference) -> None:
    """Price what may be preferred to all that is priced of the group: the simplest first, until one
    is not told apart from the fastest of all; what is less simple comes behind it."""

    def simple(layout: Layout) -> tuple[int, ...]:
        return simplicity(layout, space.asked.cluster)

    bound = REACH * seconds(first)
    tied = [simple(one[0]) for one in group.entries if is_tied(one, first, difference)]
    near = [one for one in group.promises or () if one.floor <= bound]
    for promise in sorted(near, key=lambda one: (simple(one.layout), one)):
        if tied and simple(promise.layout) > min(tied):
            break
        if promise.is_sharp or _sharpened(space, promise).floor <= bound:
            entry = entry_of(space.asked, promise.layout)
            group.entries.append(entry)
            if is_tied(entry, first, difference):
                tied.append(simple(promise.layout))


def _listed(space: Space, limit: int) -> list[Group]:
    """The groups that may be listed, each with its fastest layout priced.

    Beyond the reach of the `limit`-th fastest group nothing can be listed, but for the best
    data-parallel one.
    """
    listed: list[Group] = []
    fastest: list[float] = []
    data_parallel = inf
    groups = [Group(degrees=d, least=floor) for d, floor in space.spreads()]
    for group in sorted(groups, key=lambda group: group.least):
        bound = fastest[limit - 1] if len(fastest) >= limit else inf
        if group.is_data_parallel:
            bound = max(bound, data_parallel)
        if group.least > max(bound, REACH * min(fastest, default=inf)):
            space.tally.prune(number_of_layouts(space.asked, group.degrees))
            continue
        group.promises = [promise(space.asked, one) for one in space.layouts(group.degrees)]
        heapify(group.promises)
        _price(space, group, bound=max(bound, REACH * min(fastest, default=inf)))
        if group.entries:
            listed.append(group)
            fastest = sorted([*fastest, group.best])
            if group.is_data_parallel:
                data_parallel = min(data_parallel, group.best)
    return listed


def is_data_parallel(layout: Layout) -> bool:
    """Whether every rank computes whole layers of its own sequences."""
    return layout.tp == layout.pp == layout.cp == 1


def _price(space: Space, group: Group, *, bound: float) -> None:
    """Price what may be within `bound`, and faster than what is priced of the group."""
    best = group.best
    assert group.promises is not None
    while group.promises and group.floor <= min(best, bound):
        if not group.promises[0].is_sharp:
            heapreplace(group.promises, _sharpened(space, group.promises[0]))
            continue
        group.entries.append(entry_of(space.asked, heappop(group.promises).layout))
        best = min(best, seconds(group.entries[-1]))
