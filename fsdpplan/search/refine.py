"""Refine: settings that few programs use, tried where they may make the fastest of all.

From each layout that is priced, or that fits and was not worth pricing, one setting is changed at a
time, as long as that makes the fastest faster, or in a pipeline what it was made of and comes near
the fastest: there one change of the stages may be needed for another to gain. What cannot be faster
by its floor is not checked for memory, and what does not fit is not priced. Left out: without a
pipeline, two changes of which the first alone gains nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, product
from math import inf
from typing import Literal

from fsdpplan.cost.schedule.stages import layout_stage_blocks
from fsdpplan.search.bounds.fitting import fewest_blocks
from fsdpplan.search.bounds.room import MODES
from fsdpplan.search.order import Entry, seconds
from fsdpplan.search.rules.legality import piece_counts
from fsdpplan.search.space import Space, entry_of
from fsdpplan.search.variants import alone_as_fsdp, buckets, changed, restaged
from fsdpplan.spec.layout import ActivationCheckpointing, Layout
from fsdpplan.spec.values import replace

NEAR = 1.1
"""Times the fastest within which all pipelines are admitted of which a change may be faster by
`Floors.at`: that bound says little of what other stages gain, so beyond it there is a budget
(`MOST_PASSES`). All others are admitted by what their changes take at the least
(`Floors.may_change_below`)."""

MOST_PASSES = 4096
"""The budget for pipelines that are farther from the fastest, and the one for what fits with rare
settings alone, the most promising first: each takes the passes of its blocks by its micro-batches,
as a look at its schedules does. Where micro-batches are few, other stages gain most, and most of
what the bound admits is looked at; a search of 405B over 1,024 GPUs would take three times the
calls without it, and find the same."""

CLIMB = 1.01
"""Times the fastest that a pipeline may take for changes of it to be tried in turn: one change of
its stages may be needed for another to gain. A search of 405B over 16,384 GPUs finds the same with
none of it and without a limit, which takes three times the CPU."""

FEW_PASSES, CLIMB_OF_FEW = 64, 1.025
"""The same of a pipeline that takes no more passes than that (`Refining.passes_of`): other stages
gain more there, and a look at them costs little."""


def family(layout: Layout) -> tuple[object, ...]:
    """Layouts of one family become each other by one of the changes that are tried: it is enough
    to begin with one of them. Not those with other stages a rank, whose splits are tried of them
    alone."""
    degrees = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    policies = (layout.reshard_after_forward, layout.gradient_sync)
    return (
        *degrees,
        *layout.expert_ways,
        layout.sharding,
        layout.offload,
        layout.micro_batch,
        layout.virtual_stages,
        layout.async_tp,
        *policies,
    )


@dataclass(slots=True)
class Refining:
    """Private to one search."""

    space: Space
    best: float
    """Seconds of the fastest so far."""
    limit: float = inf
    """Seconds below which a change is worth a look: of a pipeline's stages one change may be needed
    for another to gain."""
    seen: set[Layout] = field(default_factory=set)
    refused: set[Layout] = field(default_factory=set)
    """Too slow even with the least that its changes may recompute."""
    found: list[Entry] = field(default_factory=list)
    """What was estimated."""
    begun: set[tuple[object, ...]] = field(default_factory=set)
    """Families that changes were tried of."""
    passes: int = 0
    """Spent of `MOST_PASSES`."""

    def from_priced(self, entries: Iterable[Entry]) -> None:
        """Begin with layouts that are priced."""
        given = list(entries)
        some = [*given, *self._alone(given)]
        self.seen |= {layout for layout, _ in some}
        self._from((seconds(entry), entry[0]) for entry in some)

    def _alone(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Pipelines of bare copies as FSDP over one rank, where that may come near the fastest; the
        copy may be too far from it for its changes to be tried."""
        asked, near = self.space.asked, NEAR * self.best
        if asked.pins.sharding is not None:
            return
        for layout in [layout for layout, _ in entries]:
            if layout.pp == 1 or layout.sharding != "ddp" or layout.data_parallel > 1:
                continue
            alone = alone_as_fsdp(layout)
            is_asked = alone not in self.seen and asked.pins.allows(alone)
            if is_asked and self.space.is_legal(alone) and self.space.is_better(alone, near):
                self.found.append(entry_of(asked, alone))
                yield self.found[-1]

    def from_unpriced(self, starts: Sequence[tuple[float, Layout]]) -> None:
        """Begin with layouts that are not, each with its time; of a pipeline the least of it."""
        flat = [(time, layout) for time, layout in starts if layout.pp == 1]
        piped = [entry_of(self.space.asked, one) for _, one in starts if one.pp > 1]
        self.found += piped
        self._from(flat)
        self.from_priced(piped)

    def is_worthwhile(self, layout: Layout) -> bool:
        """Whether any change of it may be faster than all so far, and was not tried."""
        is_new = family(layout) not in self.begun
        return is_new and self.space.floors.may_change_below(layout, self.best)

    def passes_of(self, layout: Layout) -> int:
        """What it takes to look at changes of a pipeline: passes of its blocks, of a layout without
        one as if it had one micro-batch."""
        return self.space.asked.model.layers * (layout.num_microbatches if layout.pp > 1 else 1)

    def _from(self, starts: Iterable[tuple[float, Layout]]) -> None:
        serial = count()
        waiting = [(time, next(serial), layout) for time, layout in starts]
        heapify(waiting)
        climbing: set[Layout] = set()
        while waiting:
            time, _, layout = heappop(waiting)
            if time > self.best and not (layout in climbing or self.is_worthwhile(layout)):
                continue
            if layout.pp > 1 and time > NEAR * self.best and not self._affords(layout):
                continue
            self.begun.add(family(layout))
            self.limit = max(self.best, min(time, self._climb(layout) * self.best))
            for entry in self._faster(layout):
                climbing.add(entry[0])
                heappush(waiting, (seconds(entry), next(serial), entry[0]))

    def _climb(self, layout: Layout) -> float:
        """Times the fastest that changes of it may take, to be changed in turn."""
        if layout.pp == 1:
            return 0.0
        return CLIMB_OF_FEW if self.passes_of(layout) <= FEW_PASSES else CLIMB

    def _affords(self, layout: Layout) -> bool:
        """Whether the budget admits it, which is charged."""
        passes = self.passes + self.passes_of(layout)
        if passes > MOST_PASSES:
            return False
        self.passes = passes
        return True

    def _faster(self, layout: Layout) -> Iterator[Entry]:
        """What one change makes of `layout`, with what has to be recomputed for it, that is faster
        than all before; of a pipeline, than what else was made of it."""
        for one in self._candidates(layout):
            entry = entry_of(self.space.asked, one)
            self.found.append(entry)
            if seconds(entry) < self.limit:
                self.limit = seconds(entry)
                self.best = min(self.best, self.limit)
                yield entry

    def _candidates(self, layout: Layout) -> Iterator[Layout]:
        yield from self.fitting(layout)
        pins = self.space.asked.pins
        for other in buckets(self.space.asked, layout):  # no less to recompute
            if pins.allows(other) and self._is_promising(other):
                yield other
        asked = self.space.asked
        for other in (*changed(asked, layout), *restaged(asked, layout)):
            is_asked = other not in self.seen and pins.allows(other)
            if is_asked and self.space.is_legal(other):
                yield from self.fitting(other)

    def fitting(self, layout: Layout) -> Iterator[Layout]:
        """`layout` as it is, and with the least of each kind of recomputation, as far as it fits
        and may be faster than all before."""
        pins = self.space.asked.pins
        if pins.activation_checkpointing is not None or pins.checkpoint_blocks is not None:
            if self._is_promising(layout):
                yield layout
            return
        whole = replace(layout, activation_checkpointing="none", checkpoint_blocks="all")
        possible = self.space.room.recomputed(layout, known="settled")
        if "none" in possible:
            if whole in self.seen or not self.space.is_below(whole, self.limit):
                return
            self.seen.add(whole)
            if self.space.fits(whole):
                yield whole
                return
        for cut, mode in product(self._cut(whole), MODES):
            if mode == "none":
                if "none" in possible and cut is not whole and self._is_promising(cut):
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
        space, best = self.space, self.limit

        def recomputing(number: int) -> Layout:
            blocks: Literal["all"] | int = "all" if number == most else number
            return replace(layout, activation_checkpointing=mode, checkpoint_blocks=blocks)

        most = max(layout_stage_blocks(model=space.asked.model, layout=layout))
        numbers = range(max(1, -(-least // layout.virtual_stages)), most + 1)
        if not numbers or not space.is_legal(recomputing(numbers[0])):
            return None
        fewest = recomputing(numbers[0])
        if fewest in self.refused or not space.may_be_below(fewest, best):
            self.refused.add(fewest)
            return None
        fast = bisect_left(numbers, 1, key=lambda n: not space.is_hopeful(recomputing(n), best))
        if not fast or not space.fits(recomputing(numbers[fast - 1])):
            return None
        number = fewest_blocks(space.asked, recomputing(numbers[fast - 1]), at_least=numbers[0])
        some = recomputing(number)
        if some in self.seen:
            return None
        self.seen.add(some)
        return some if space.is_below(some, best) else None

    def _is_promising(self, layout: Layout) -> bool:
        """Not tried yet, fits, and may be faster than all before."""
        if layout in self.seen:
            return False
        self.seen.add(layout)
        return self.space.is_better(layout, self.limit)
