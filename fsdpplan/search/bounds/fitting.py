"""Fitting: the layouts with given degrees that are legal and fit, without the dominated ones.

Three bounds leave out most of the work. What does not fit with its parameters resharded does not
fit with more of them kept; without a pipeline, a micro-batch that does not fit while gradients
accumulate leaves no room for a larger one; and recomputation is only taken where memory asks for
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import fullest_ranks, layout_stage_blocks
from fsdpplan.search.bounds.room import Room
from fsdpplan.search.enumerate import (
    Degrees,
    layout_of,
    schedules,
    sync_policies,
)
from fsdpplan.search.question import Question
from fsdpplan.search.rules.legality import first_problem, in_pieces, most_saved_bytes
from fsdpplan.search.rules.rule import Problem
from fsdpplan.search.variants import reshards
from fsdpplan.spec.layout import ActivationCheckpointing, GradientSync, Layout
from fsdpplan.spec.values import replace

TOO_LARGE = "does not fit in device memory"

Policies = tuple[object, ...]


@dataclass(slots=True)
class Tally:
    """What the search has seen so far; private to one call."""

    candidates: int = 0
    feasible: int = 0
    pruned: int = 0
    priced: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    misses: dict[Degrees, None] = field(default_factory=dict)
    """Ways to spread the ranks of which a legal layout does not fit, as long as none does."""
    examples: dict[str, str] = field(default_factory=dict)
    """What to say of the first layout that was rejected for a reason."""

    def reject(self, reason: str, number: int = 1) -> None:
        """Count `number` layouts as rejected."""
        self.candidates += number
        self.rejected[reason] += number

    def break_rule(self, broken: Problem, number: int = 1) -> None:
        """Count `number` layouts as illegal."""
        self.reject(broken.reason, number)
        self.examples.setdefault(broken.reason, broken.sentence)

    def accept(self, number: int = 1) -> None:
        """Count `number` layouts as fitting."""
        self.candidates += number
        self.feasible += number

    def prune(self, number: int) -> None:
        """Count `number` layouts as cut by a bound."""
        self.candidates += number
        self.pruned += number

    def missed(self, d: Degrees) -> None:
        """Remember degrees with which a layout does not fit, while none does."""
        if not self.feasible:
            self.misses[d] = None

    def spare(self, number: int) -> None:
        """Count `number` layouts that did not fit with the usual settings as fitting."""
        self.rejected[TOO_LARGE] -= number
        self.feasible += number


@dataclass(slots=True)
class Fitting:
    """The layouts with given degrees, and what each must recompute to fit; private to a search."""

    asked: Question
    degrees: Degrees
    tally: Tally
    room: Room
    too_large: dict[Policies, int] = field(default_factory=dict)
    """The smallest micro-batch with which policies did not fit, however much is recomputed."""
    hopeful: dict[Layout, list[ActivationCheckpointing]] = field(default_factory=dict)
    """What its layouts may have to recompute."""

    def leaves(self, micro_batch: int) -> Iterator[Layout]:
        """Those with a micro-batch that are legal, with the least recomputation; what memory rules
        out at sight is left out: with it, what keeps no less of parameters and of gradients."""
        asked, d = self.asked, self.degrees
        number = _number_of_microbatches(asked, d, micro_batch)
        ways = schedules(d=d, model=asked.model, num_microbatches=number, pins=asked.pins)
        policies, syncs = reshards(asked, d), _syncs(asked, d, number)
        for schedule, virtual_stages in ways:
            possible = len(syncs)
            for reshard in policies:
                self._reject(len(syncs) - possible)
                for at, sync in enumerate(syncs[:possible]):
                    layout = layout_of(
                        d,
                        micro_batch=micro_batch,
                        num_microbatches=number,
                        reshard=reshard,
                        sync=sync,
                        schedule=schedule,
                        virtual_stages=virtual_stages,
                        compiled=asked.compiled,
                        pins=asked.pins,
                        model=asked.model,
                        training=asked.training,
                    )
                    broken = first_problem(asked.case(layout))
                    if broken is not None:
                        self.tally.break_rule(broken, len(asked.modes))
                    elif self.hopeful_modes(layout):
                        yield layout
                    else:
                        self._reject(possible - at)
                        possible = at
                        break

    def hopeful_modes(self, layout: Layout) -> list[ActivationCheckpointing]:
        """What it may have to recompute in order to fit, growing; empty: it cannot."""
        if layout not in self.hopeful:
            alike = self.asked.pins.checkpoint_blocks in (None, "all")
            possible = self.room.recomputed(layout, known="alike" if alike else "settled")
            some = [mode for mode in self.asked.modes if "none" in possible or mode in possible]
            self.hopeful[layout] = some
        return self.hopeful[layout]

    def settled(self, layout: Layout) -> list[Layout]:
        """A leaf with the least recomputation that fits, and, where this is less still, with the
        least that fits with the loss in pieces: more of either only costs time. Empty: nothing
        fits."""
        if self._is_spared(layout):
            self.tally.prune(len(self.asked.modes))
            return []
        found = [] if self._is_too_large(layout) else self._least(layout)
        if found:
            self.tally.accept(len(self.asked.modes))
        else:
            self._reject()
        return found

    def _is_spared(self, layout: Layout) -> bool:
        """Whether its state is on the host and need not be: on the device the same layout fits
        without more recomputation, and takes no longer."""
        asked = self.asked
        if layout.offload == "none" or asked.pins.offload is not None:
            return False
        here = replace(layout, offload="none", activation_checkpointing=asked.modes[0])
        case = asked.case(here)
        if first_problem(case) is not None or "none" not in self.room.recomputed(here):
            return False
        available = asked.available_bytes
        return needed_bytes(asked, here, enough_bytes=available) <= available

    def _least(self, layout: Layout) -> list[Layout]:
        available = self.asked.available_bytes
        pieces: Layout | None = None
        for mode in self.hopeful_modes(layout):
            recomputing = replace(layout, activation_checkpointing=mode)
            needed = needed_bytes(self.asked, recomputing, enough_bytes=available)
            if needed <= available:
                return [recomputing, pieces] if pieces else [recomputing]
            pieces = pieces or _in_pieces(self.asked, recomputing, needed)
        if pieces is None:
            key = _policies(layout)
            self.too_large[key] = min(
                layout.micro_batch, self.too_large.get(key, layout.micro_batch)
            )
        return [pieces] if pieces else []

    def _reject(self, number: int = 1) -> None:
        if number:
            self.tally.reject(TOO_LARGE, number * len(self.asked.modes))
            self.tally.missed(self.degrees)

    def _is_too_large(self, layout: Layout) -> bool:
        """Whether what needs no more did not fit: parameters resharded, a smaller micro-batch."""
        leanest = reshards(self.asked, self.degrees)[0]
        resharded = replace(layout, reshard_after_forward=leanest)
        return any(
            layout.micro_batch >= self.too_large.get(_policies(other), layout.micro_batch + 1)
            for other in (layout, resharded)
        )


def _policies(layout: Layout) -> Policies:
    """What a layout's memory depends on, given its degrees and its recomputation."""
    return (
        layout.schedule,
        layout.virtual_stages,
        layout.reshard_after_forward,
        layout.gradient_sync,
        # as long as gradients accumulate, a larger micro-batch never needs less; in a pipeline
        # fewer of them may be over before gradients grow
        0 if layout.num_microbatches > 1 and layout.pp == 1 else layout.micro_batch,
    )


def _in_pieces(asked: Question, layout: Layout, at_least_bytes: int) -> Layout | None:
    """`layout`, which needs `at_least_bytes` and does not fit, with its loss in pieces, if then it
    does."""
    pieces = in_pieces(layout, training=asked.training, pins=asked.pins)
    saved = most_saved_bytes(asked.case(layout))
    available = asked.available_bytes
    if pieces is None or at_least_bytes - saved > available:
        return None
    return pieces if needed_bytes(asked, pieces, enough_bytes=available) <= available else None


def fewest_blocks(asked: Question, layout: Layout, *, at_least: int = 1) -> int:
    """Of `layout`, which fits with as many blocks of a stage recomputed as it says, the fewest with
    which it does, but `at_least`: fewer than these cannot fit.

    More recomputed blocks never need more memory, so the border lies between one number that does
    not fit and one that does; memory is about a straight line between them.
    """
    some = layout.checkpoint_blocks
    high = max(layout_stage_blocks(model=asked.model, layout=layout)) if some == "all" else some
    available = asked.available_bytes
    if high <= at_least:
        return high

    def needed_with(number: int) -> int:
        fewer = replace(layout, checkpoint_blocks=number)
        return needed_bytes(asked, fewer, enough_bytes=available)

    low, low_bytes = at_least, needed_with(at_least)
    if low_bytes <= available:
        return low
    high_bytes = needed_bytes(asked, layout)
    while high - low > 1:
        share = (low_bytes - available) / max(1, low_bytes - high_bytes)
        middle = min(high - 1, max(low + 1, round(low + share * (high - low) + 0.5)))
        needed = needed_with(middle)
        if needed <= available:
            high, high_bytes = middle, needed
        else:
            low, low_bytes = middle, needed
    return high


def needed_bytes(asked: Question, layout: Layout, *, enough_bytes: int | None = None) -> int:
    """Device memory of the fullest rank: of equal ranks, that with most in flight; of the parts of
    a run whose precision changes, in that which needs most.

    With `enough_bytes` that of the first rank that needs more than that, if any does.
    """
    needed = 0
    for _, case in asked.case(layout).phases:
        for stage, blocks in fullest_ranks(model=asked.model, layout=layout):
            memory = stage_memory(case, stage, in_flight_blocks=blocks)
            needed = max(needed, memory.peak_device_bytes)
            if enough_bytes is not None and needed > enough_bytes:
                return needed
    return needed


def number_of_layouts(asked: Question, d: Degrees, micro_batch: int) -> int:
    """How many layouts there are with these degrees and a micro-batch, each way to recompute
    counted."""
    of_rank = _number_of_microbatches(asked, d, micro_batch)
    ways = schedules(d=d, model=asked.model, num_microbatches=of_rank, pins=asked.pins)
    syncs = _syncs(asked, d, of_rank)
    return len(list(ways)) * len(reshards(asked, d)) * len(syncs) * len(asked.modes)


def _number_of_microbatches(asked: Question, d: Degrees, micro_batch: int) -> int:
    return max(1, asked.training.global_batch // (d.data_parallel * micro_batch))


def _syncs(asked: Question, d: Degrees, num_microbatches: int) -> tuple[GradientSync, ...]:
    return sync_policies(d=d, num_microbatches=num_microbatches, pins=asked.pins)
