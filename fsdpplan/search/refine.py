"""Refine: settings that few programs use, tried where they may make the fastest of all.

From each layout that is priced, or that fits and was not worth pricing, one setting is changed at a
time, as long as that makes the fastest faster. What cannot be faster by its floor is not checked
for memory, and what does not fit is not priced. Left out: two changes of which the first alone
gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count, product
from math import inf

from fsdpplan.search.fitting import fewest_blocks
from fsdpplan.search.order import Entry, seconds
from fsdpplan.search.pieces import piece_counts
from fsdpplan.search.room import MODES
from fsdpplan.search.space import Space, entry_of
from fsdpplan.search.variants import buckets, changed, restaged
from fsdpplan.spec.layout import ActivationCheckpointing, Layout

NEAR = 1.1
"""Times the fastest that a layout may take for changes of it to be tried."""


def refined(
    space: Space, entries: list[Entry], unpriced: Iterable[tuple[float, Layout]]
) -> list[Entry]:
    """What was found faster than all of `entries`, or than what was found before it."""
    search = _Refining(space, best=min(map(seconds, entries), default=inf))
    search.seen |= {layout for layout, _ in entries}
    serial = count()
    waiting = [(time, next(serial), layout, 0.0) for time, layout in unpriced]
    waiting += [_begun(entry, next(serial)) for entry in entries]
    heapify(waiting)
    begun: set[tuple[object, ...]] = set()
    while waiting:
        time, _, layout, bubble = heappop(waiting)
        family = _family(layout)
        if time > NEAR * search.best:
            break
        if time > search.best and (family in begun or space.floors.at(layout) >= search.best):
            continue
        begun.add(family)
        # other stages spare no more than the bubble
        for entry in search.faster(layout, restages=time - bubble < search.best):
            heappush(waiting, _begun(entry, next(serial)))
    return search.found


def _begun(entry: Entry, serial: int) -> tuple[float, int, Layout, float]:
    return seconds(entry), serial, entry[0], entry[1].time.bubble_seconds


def _family(layout: Layout) -> tuple[object, ...]:
    """Layouts of one family become each other by the changes that are tried: it is enough to begin
    with one of them."""
    ways = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.ep)
    return (*ways, layout.sharding, layout.micro_batch, layout.async_tp)


@dataclass(slots=True)
class _Refining:
    """Private to one search."""

    space: Space
    best: float
    """Seconds of the fastest so far."""
    seen: set[Layout] = field(default_factory=set)
    found: list[Entry] = field(default_factory=list)

    def faster(self, layout: Layout, *, restages: bool) -> Iterator[Entry]:
        """What one change makes of `layout`, with what has to be recomputed for it, that is faster
        than all before."""
        for one in self._candidates(layout, restages):
            entry = entry_of(self.space.asked, one)
            self.found.append(entry)
            if seconds(entry) < self.best:
                self.best = seconds(entry)
                yield entry

    def _candidates(self, layout: Layout, restages: bool) -> Iterator[Layout]:
        yield from self._fitting(layout)
        for other in buckets(self.space.asked, layout):  # no less to recompute
            if self._is_promising(other):
                yield other
        others = changed(self.space.asked, layout)
        for other in (*others, *(restaged(self.space.asked, layout) if restages else ())):
            if other not in self.seen and self.space.is_legal(other):
                yield from self._fitting(other)

    def _fitting(self, layout: Layout) -> Iterator[Layout]:
        """`layout` as it is, and with the least of each kind of recomputation, as far as it fits
        and may be faster than all before."""
        pins = self.space.asked.pins
        if pins.activation_checkpointing is not None or pins.checkpoint_blocks is not None:
            if self._is_promising(layout):
                yield layout
            return
        whole = replace(layout, activation_checkpointing="none", checkpoint_blocks="all")
        if self.space.floor(whole) >= self.best:
            return
        if self._is_promising(whole):
            yield whole
            return
        possible = self.space.room.recomputed(replace(layout, stage_blocks=()))
        for cut, mode in product(self._cut(whole), MODES):
            if mode == "none":
                if cut is not whole and self._is_promising(cut):
                    yield cut
            elif "none" in possible or mode in possible:
                some = self._recomputing(cut, mode, possible.get(mode, 0))
                if some is not None:
                    yield some

    def _cut(self, layout: Layout) -> tuple[Layout, ...]:
        """With its loss whole, and in the fewest pieces: it is often the loss that is too large."""
        asked = self.space.asked
        counts = piece_counts(layout, training=asked.training, pins=asked.pins)
        if layout.loss_chunks > 1 or not counts:
            return (layout,)
        return (layout, replace(layout, loss_chunks=counts[0]))

    def _recomputing(
        self, layout: Layout, mode: ActivationCheckpointing, least: int
    ) -> Layout | None:
        """`layout` with the fewest blocks recomputed that make it fit."""
        every = replace(layout, activation_checkpointing=mode)
        fewest = replace(every, checkpoint_blocks=max(1, -(-least // layout.virtual_stages)))
        if not self.space.is_legal(fewest) or self.space.floor(fewest) >= self.best:
            return None
        if not self.space.fits(every):
            return None
        number = fewest_blocks(self.space.asked, every)
        some = every if number is None else replace(every, checkpoint_blocks=number)
        if some in self.seen:
            return None
        self.seen.add(some)
        return some if self.space.floor(some) < self.best else None

    def _is_promising(self, layout: Layout) -> bool:
        """Not tried yet, fits, and may be faster than all before."""
        if layout in self.seen:
            return False
        self.seen.add(layout)
        return self.space.floor(layout) < self.best and self.space.fits(layout)
