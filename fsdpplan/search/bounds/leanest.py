"""Leanest: what comes nearest to fitting, or fits after all, where no layout with the usual
settings does.

The search settles layouts with the usual settings alone, which memory decides seldom. Where none of
them fits, each way to spread the ranks is taken with the settings that need least, the rare ones
too: one setting after another takes the value that needs least beside the others, until none gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from operator import itemgetter

from fsdpplan.search.bounds.fitting import needed_bytes
from fsdpplan.search.bounds.room import MODES
from fsdpplan.search.enumerate import micro_batches
from fsdpplan.search.question import Question
from fsdpplan.search.rules.legality import piece_counts
from fsdpplan.search.space import Space
from fsdpplan.search.variants import changed, overlapped, restaged
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.values import replace

Lever = Callable[[Question, Layout], Iterator[Layout]]
"""Layouts with another value of a setting, or of two that only gain together; legal or not."""


def _batches(asked: Question, layout: Layout) -> Iterator[Layout]:
    """Other micro-batches, with gradients that accumulate as they did, or not at all."""
    training, share = asked.training, layout.micro_batch * layout.num_microbatches
    ranks = layout.data_parallel
    for size in micro_batches(training=training, data_parallel=ranks, pins=asked.pins):
        if share % size == 0:
            yield replace(layout, micro_batch=size, num_microbatches=share // size)


def _recomputation(asked: Question, layout: Layout) -> Iterator[Layout]:
    for mode in MODES:
        blocks = "all" if mode == "none" else layout.checkpoint_blocks
        yield replace(layout, activation_checkpointing=mode, checkpoint_blocks=blocks)


def _overlapped(asked: Question, layout: Layout) -> Iterator[Layout]:
    yield from overlapped(asked, layout)
    yield replace(layout, async_tp=False)


def _frees(asked: Question, layout: Layout) -> Iterator[Layout]:
    """FSDP over one rank, which frees what it has cast, in the place of a bare copy; often its
    logits hide what that spares."""
    if layout.sharding == "ddp" and layout.data_parallel == 1:
        freeing = replace(layout, sharding="fsdp")
        counts = piece_counts(freeing, training=asked.training, pins=asked.pins)
        yield from (replace(freeing, loss_chunks=n) for n in (layout.loss_chunks, *counts))


LEVERS: tuple[Lever, ...] = (_frees, _recomputation, changed, _batches, restaged, _overlapped)


MOST_DEGREES = 16
"""Ways to spread the ranks whose settings are tried one after another: those that need least with
the settings that spare most. `make nearest` holds what is found against brute force."""

FITTING_DEGREES = 4
"""The same where all that is asked is whether any fits, of many questions in turn: of 405B on 48 to
112 GPUs sixteen say the same and take 5 to 30 times as long."""


@dataclass(slots=True)
class Leanest:
    """The leanest layouts of one question; private to a search."""

    space: Space
    needed: dict[Layout, float] = field(default_factory=dict)
    """Bytes of the layouts that were looked at; infinite of those that are not legal."""

    def layouts(self) -> list[tuple[float, Layout]]:
        """(bytes that it needs, layout) of the ways to spread the ranks that come nearest, the
        leanest first; of each with the first settings that fit, or else with the leanest."""
        starts = nsmallest(MOST_DEGREES, self._starts(), key=itemgetter(0))
        found = [self._leaner(layout) for _, layout in starts]
        return sorted(((self._bytes(one), one) for one in found), key=itemgetter(0))

    def fitting(self) -> Layout | None:
        """A layout that fits, as far as any of the leanest ways to spread the ranks does; what
        cannot by its bound is not looked at."""
        available = self.space.asked.available_bytes
        starts = nsmallest(FITTING_DEGREES, self._starts(most=available), key=itemgetter(0))
        found = (self._leaner(layout) for _, layout in starts)
        return next((one for one in found if self._bytes(one) <= available), None)

    def _starts(self, *, most: float = inf) -> Iterator[tuple[float, Layout]]:
        """Of each way to spread the ranks that may be among the leanest, and may need no more than
        `most`, what it needs with the settings that spare most."""
        bounded = [(self._bound(start), start) for start in self._spreads()]
        nearest: list[float] = []
        for least, start in sorted(bounded, key=itemgetter(0)):
            if least > most or (len(nearest) == MOST_DEGREES and least >= nearest[-1]):
                break
            layout = min(self._sparing(start), key=self._bytes)
            if (needed := self._bytes(layout)) < inf:
                nearest = sorted((*nearest, needed))[:MOST_DEGREES]
                yield needed, layout

    def _bound(self, start: Layout) -> int:
        """The least that it may need, whatever its settings."""
        asked, room = self.space.asked, self.space.room
        return min(room.least_bytes(one) for one in (start, *_frees(asked, start)))

    def _spreads(self) -> Iterator[Layout]:
        """What was missed, with the smallest micro-batch, and with the largest, whose gradients
        never add up."""
        space = self.space
        for d in space.tally.misses:
            sizes = space.floors.sizes(d)
            for size in dict.fromkeys((sizes[0], sizes[-1])):
                plain = space.floors.plain(d, size)
                yield replace(plain, activation_checkpointing=space.asked.modes[-1])

    def _sparing(self, layout: Layout) -> Iterator[Layout]:
        """As it is, and with its loss in the most pieces."""
        asked = self.space.asked
        yield layout
        counts = piece_counts(layout, training=asked.training, pins=asked.pins)
        if counts:
            yield replace(layout, loss_chunks=counts[-1])

    def _leaner(self, layout: Layout) -> Layout:
        """`layout` with the value of each setting that needs least beside the others, or with the
        first that fit."""
        asked = self.space.asked
        before: Layout | None = None
        while layout != before:
            before = layout
            for lever in LEVERS:
                if self._bytes(layout) <= asked.available_bytes:
                    return layout
                others = (one for one in lever(asked, layout) if asked.pins.allows(one))
                layout = min((layout, *others), key=self._bytes)
        return layout

    def _bytes(self, layout: Layout) -> float:
        if layout not in self.needed:
            is_legal = self.space.is_legal(layout)
            self.needed[layout] = needed_bytes(self.space.asked, layout) if is_legal else inf
        return self.needed[layout]
