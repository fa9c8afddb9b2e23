"""Pricing: as few estimates as find the same layouts that pricing everything would.

A layout is only priced while its lower bound does not rule it out: against the fastest of its own
way to spread the ranks for a place in the list, and against the fastest of all, with the reach of
an error, for the first place.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from operator import itemgetter

from fsdpplan.search.bounds.frontier import REACH, Frontier, Group, Known, Promise
from fsdpplan.search.bounds.leanest import Leanest
from fsdpplan.search.order import (
    Difference,
    Entry,
    by_time,
    is_data_parallel,
    is_tied,
    seconds,
    simplicity,
)
from fsdpplan.search.refine import MOST_PASSES, NEAR, Refining, family
from fsdpplan.search.space import Space, entry_of
from fsdpplan.search.variants import sparing
from fsdpplan.spec.layout import Layout

MOST_PASSES_EACH = MOST_PASSES // 16
"""Of one layout that fits with rare settings alone: large questions have tens of thousands that the
bound admits."""

MOST_SPARED = 3
"""Of those, the fastest whose other settings are tried in turn."""


def priced(space: Space, limit: int, difference: Difference) -> list[Entry]:
    """All layouts that the first place may go to, and of each group that may be listed the fastest
    with the usual settings.

    The first place goes to a layout within reach of the fastest; the best data-parallel layout is
    always listed.
    """
    frontier = Frontier(space)
    listed = frontier.price_listed(limit)
    usual = [entry for group in listed for entry in group.entries]
    if not usual:
        frontier.count_left_out()
        return _spared(space)
    fastest = {min(group.entries, key=by_time)[0] for group in listed}
    refining = Refining(space, best=min(map(seconds, usual)))
    refining.from_priced(usual)
    starts = list(_starts(frontier, refining))
    refining.from_unpriced(starts)
    refining.found += _data_parallel(space, [*usual, *refining.found], starts)
    _refine_spared(frontier, refining)
    first = min((*usual, *refining.found), key=by_time)
    for group in listed:
        _price_preferred(frontier, group, first, difference)
    frontier.count_left_out()
    found = [*(one for group in frontier.groups for one in group.entries), *refining.found]
    space.priced = found
    space.tally.priced = len(found)
    best = seconds(min(found, key=by_time))
    return [entry for entry in found if seconds(entry) <= REACH * best or entry[0] in fastest]


def _spared(space: Space) -> list[Entry]:
    """Where nothing fits with the usual settings: what rare ones make fit, and what may be made of
    that; what comes nearest is remembered where nothing does."""
    found = Leanest(space).layouts()
    available = space.asked.available_bytes
    spared = [entry_of(space.asked, layout) for needed, layout in found if needed <= available]
    if not spared:
        space.closest = found[0][1] if found else None
        return []
    space.tally.spare(len(spared))
    refining = Refining(space, best=min(map(seconds, spared)))
    refining.from_priced(spared)
    space.priced = [*spared, *refining.found]
    space.tally.priced = len(space.priced)
    return space.priced


def _data_parallel(
    space: Space, entries: list[Entry], starts: list[tuple[float, Layout]]
) -> list[Entry]:
    """Where the fastest is no data-parallel layout, but one that rare settings may bring within
    reach of it is: what they make of those. The simplest is to be compared at its best."""
    plain = [entry for entry in entries if is_data_parallel(entry[0])]
    best = min(map(seconds, entries))
    own = min(map(seconds, plain), default=inf)
    if not best < own <= NEAR * best:
        return []
    refining = Refining(space, best=own)
    refining.from_priced(plain)
    refining.from_unpriced([one for one in starts if is_data_parallel(one[1])])
    return refining.found


def faster(space: Space, most_seconds: float) -> Entry | None:
    """The fastest with the usual settings that takes less than that, and what rare ones make of
    it; None where none does. It looks at no layout whose bound is higher."""
    frontier = Frontier(space)
    best, found = most_seconds, list[Entry]()
    heap = [(group.floor, index) for index, group in enumerate(frontier.groups)]
    heapify(heap)
    while heap and heap[0][0] < best:
        _, index = heappop(heap)
        group = frontier.groups[index]
        priced = len(group.entries)
        frontier.advance(group)
        found += group.entries[priced:]
        best = min(best, group.best)
        heappush(heap, (group.floor, index))
    refining = Refining(space, best=best)
    refining.from_priced(found)
    below = [entry for entry in (*found, *refining.found) if seconds(entry) < most_seconds]
    return min(below, key=by_time, default=None)


def any_below(space: Space, most_seconds: float) -> Entry | None:
    """A layout that takes less than that, with usual or rare settings; None where there is none.
    What is looked at may take `NEAR` times as long: two changes may bring it below."""
    frontier = Frontier(space)
    most, found = NEAR * most_seconds, list[Entry]()
    heap = [(group.floor, index) for index, group in enumerate(frontier.groups)]
    heapify(heap)
    while heap and heap[0][0] < most:
        _, index = heappop(heap)
        group = frontier.groups[index]
        priced = len(group.entries)
        frontier.advance(group)
        found += group.entries[priced:]
        if group.best < most_seconds:
            return min(group.entries, key=by_time)
        heappush(heap, (group.floor, index))
    refining = Refining(space, best=most)
    refining.from_priced(found)
    refining.from_unpriced(list(_starts(frontier, refining)))
    _refine_spared(frontier, refining)
    fastest = min(refining.found, key=by_time, default=None)
    return fastest if fastest is not None and seconds(fastest) < most_seconds else None


def usual(space: Space, limit: int) -> list[Entry]:
    """Of each group that may be listed, the fastest with the usual settings, and what had to be
    priced to find it."""
    return [entry for group in Frontier(space).price_listed(limit) for entry in group.entries]


def _starts(frontier: Frontier, refining: Refining) -> Iterator[tuple[float, Layout]]:
    """What is not priced and of which a change may be faster than all so far, each with its time,
    the fastest first; of a pipeline the least that it takes, and beyond what is near the fastest as
    many as `MOST_PASSES` admits."""
    leads, near = _host_leads(frontier, refining), NEAR * refining.best
    heap = [(group.floor, index) for index, group in enumerate(frontier.groups)]
    heapify(heap)
    aside = [list[Promise]() for _ in heap]
    far: dict[tuple[object, ...], int] = {}
    while heap:
        floor, index = heappop(heap)
        group = frontier.groups[index]
        is_far = floor > near and group.degrees.pp > 1
        # state on the host that leads nowhere need not be looked at any farther
        is_idle = floor > near and group.is_spare and not leads
        if floor == inf or is_idle or (is_far and sum(far.values()) > MOST_PASSES):
            continue
        if group.found is None:
            if group.least < refining.best:
                frontier.advance(group)
                heappush(heap, (group.floor, index))
            continue
        promise = group.promises[0]
        if promise.known != Known.SHARP and _may_start(promise, refining):
            frontier.advance(group)
        else:
            aside[index].append(heappop(group.promises))
        heappush(heap, (group.floor, index))
        if promise.known == Known.SHARP:
            if is_far:
                far[family(promise.layout)] = refining.passes_of(promise.layout)
            yield promise.floor, promise.layout
    for group, some in zip(frontier.groups, aside, strict=True):
        group.promises += some
        heapify(group.promises)


def _host_leads(frontier: Frontier, refining: Refining) -> bool:
    """Whether the fastest so far has its state on the host."""
    usual = (entry for group in frontier.groups for entry in group.entries)
    fastest = min((*usual, *refining.found), key=by_time, default=None)
    return fastest is not None and fastest[0].offload != "none"


def _refine_spared(frontier: Frontier, refining: Refining) -> None:
    """Of ways to spread the ranks and micro-batches with which nothing fits with the usual
    settings, and something else may be faster than all so far, the most promising first, as many as
    `MOST_PASSES` admits: what fits with those that need less, and what may be made of that."""
    space, passes, spared = frontier.space, 0, list[Entry]()
    unfit = (one for group in frontier.groups for one in _unfit(frontier, group))
    hopeful = [one for one in unfit if space.floors.may_be_below(one, refining.best)]
    floors = [(space.floors.at(one), one) for one in hopeful]
    for least, layout in sorted(floors, key=itemgetter(0)):
        passes += refining.passes_of(layout)
        if passes > MOST_PASSES or least >= refining.best:
            break
        for one in sparing(space.asked, layout):
            is_asked = space.asked.pins.allows(one) and space.is_legal(one)
            if is_asked and space.room.recomputed(one, known="settled") and space.fits(one):
                spared.append(entry_of(space.asked, one))
                refining.best = min(refining.best, seconds(spared[-1]))
    refining.found += spared
    refining.from_priced(nsmallest(MOST_SPARED, spared, key=seconds))


def _unfit(frontier: Frontier, group: Group) -> Iterator[Layout]:
    """One of each micro-batch that `MOST_PASSES_EACH` admits, with which nothing of the group fits
    with the usual settings."""
    if group.found is None and group.least < inf:
        return
    asked, floors = frontier.space.asked, frontier.space.floors
    d, there = group.degrees, group.sizes
    most = MOST_PASSES_EACH // asked.model.layers if d.pp > 1 else inf
    for size in floors.sizes(d):
        number = asked.training.global_batch // (d.data_parallel * size)
        if number <= most and size not in there:
            yield floors.plain(d, size)


def _may_start(promise: Promise, refining: Refining) -> bool:
    """Whether a change of what is promised may be faster than all so far."""
    layout = promise.layout
    if promise.known == Known.SIZE:  # it stands for all policies
        return refining.space.floors.may_be_below(layout, refining.best)
    is_whole = layout.pp > 1 and promise.known >= Known.FITS
    return is_whole or refining.is_worthwhile(layout)


def _price_preferred(
    frontier: Frontier, group: Group, first: Entry, difference: Difference
) -> None:
    """Price what may be preferred to all that is priced of the group: the simplest first, until one
    is not told apart from the fastest of all; what is less simple comes behind it."""
    asked = frontier.space.asked

    def simple(layout: Layout) -> tuple[int, ...]:
        return simplicity(layout, asked.cluster)

    bound = REACH * seconds(first)
    tied = [simple(one[0]) for one in group.entries if is_tied(one, first, difference)]
    near = [(simple(one.layout), one) for one in group.promises if one.floor <= bound]
    left = [one for one in group.promises if one.floor > bound]
    heapify(near)
    while near and not (tied and near[0][0] > min(tied)):
        _, promise = heappop(near)
        if promise.known == Known.SHARP:
            entry = entry_of(asked, promise.layout)
            group.entries.append(entry)
            if is_tied(entry, first, difference):
                tied.append(simple(promise.layout))
            continue
        for one in frontier.closer(group, promise):
            if one.floor <= bound:
                heappush(near, (simple(one.layout), one))
            else:
                left.append(one)
    group.promises = [*left, *(one for _, one in near)]
    heapify(group.promises)
