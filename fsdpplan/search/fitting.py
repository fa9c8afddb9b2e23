"""Fitting: the layouts with given degrees that are legal and fit, without the dominated ones.

Three bounds leave out most of the work. What does not fit with its parameters resharded does not
fit with more of them kept; without a pipeline, a micro-batch that does not fit while gradients
accumulate leaves no room for a larger one; and recomputation is only taken where memory asks for
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fsdpplan.cost.memory import stage_memory
from fsdpplan.cost.pipeline_stages import in_flight_blocks, layout_stage_blocks, pipeline_ranks
from fsdpplan.cost.shards import Stage
from fsdpplan.search.enumerate import (
    Degrees,
    layout_of,
    micro_batches,
    reshard_policies,
    schedules,
    sync_policies,
)
from fsdpplan.search.legality import first_problem
from fsdpplan.search.pieces import in_pieces, most_saved_bytes
from fsdpplan.search.question import Question
from fsdpplan.search.room import Recomputed, Room
from fsdpplan.search.rule import Problem
from fsdpplan.spec.layout import Layout

TOO_LARGE = "does not fit in device memory"


@dataclass(slots=True)
class Tally:
    """What the search has seen so far; private to one call."""

    candidates: int = 0
    feasible: int = 0
    pruned: int = 0
    priced: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    closest: tuple[int, Layout] | None = None
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

    def missed(self, asked: Question, layout: Layout, *, at_least_bytes: int) -> None:
        """Remember the layout that comes closest to fitting, while none does."""
        if self.feasible or (self.closest and at_least_bytes >= self.closest[0]):
            return
        needed = needed_bytes(asked, layout)
        if self.closest is None or needed < self.closest[0]:
            self.closest = (needed, layout)


def hopeless(asked: Question, d: Degrees) -> str | None:
    """Why no layout with these degrees can work, whatever its policies."""
    innermost = asked.cluster.levels[0].domain_gpus
    if d.tp > innermost and asked.pins.tp is None:
        return "tp leaves the fastest links"
    if asked.training.global_batch % d.data_parallel:
        return "global batch is not a multiple of the data-parallel ranks"
    if d.pp * (asked.pins.virtual_stages or 1) > asked.model.layers:
        return "more pipeline stages than blocks"
    if asked.training.global_batch // d.data_parallel < d.pp:
        return "fewer micro-batches than pipeline stages"
    return None


def fitting(asked: Question, d: Degrees, tally: Tally, room: Room) -> Iterator[Layout]:
    """Layouts with these degrees that are legal and fit, each with the least recomputation."""
    too_large: set[Policies] = set()
    for leaves in _leaves(asked, d):
        for layout in leaves:
            if too_large & _no_smaller(layout, leaves[0]):
                tally.reject(TOO_LARGE, len(asked.modes))
                continue
            broken = first_problem(
                model=asked.model, cluster=asked.cluster, training=asked.training, layout=layout
            )
            if broken is not None:
                tally.break_rule(broken, len(asked.modes))
                continue
            fits = _least_recomputation(asked, layout, tally, room)
            if fits:
                tally.accept(len(asked.modes))
                yield from fits
                continue
            tally.reject(TOO_LARGE, len(asked.modes))
            too_large.add(_policies(layout))


Policies = tuple[object, ...]


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


def _no_smaller(layout: Layout, least: Layout) -> set[Policies]:
    """Policies that never need more than those of `layout`: where they fail, it fails."""
    resharded = replace(layout, reshard_after_forward=least.reshard_after_forward)
    return {_policies(layout), _policies(resharded)}


def _least_recomputation(asked: Question, layout: Layout, tally: Tally, room: Room) -> list[Layout]:
    """`layout` with the least recomputation that fits, and, where this is less still, with the
    least that fits with the loss in pieces: more of either only costs time."""
    modes = [replace(layout, activation_checkpointing=mode) for mode in asked.modes]
    possible = room.recomputed(layout)
    hopeful = [mode for mode in modes if _is_possible(mode, possible)]
    available = asked.available_bytes
    pieces: Layout | None = None
    for mode in hopeful:
        needed = needed_bytes(asked, mode, enough_bytes=available)
        if needed <= available:
            return [mode, pieces] if pieces else [mode]
        pieces = pieces or _in_pieces(asked, mode, needed)
    if pieces is None:
        tally.missed(asked, modes[-1], at_least_bytes=room.least_bytes(layout))
    return [pieces] if pieces else []


def _is_possible(layout: Layout, possible: Recomputed) -> bool:
    return "none" in possible or layout.activation_checkpointing in possible


def _in_pieces(asked: Question, layout: Layout, at_least_bytes: int) -> Layout | None:
    """`layout`, which needs `at_least_bytes` and does not fit, with its loss in pieces, if then it
    does."""
    pieces = in_pieces(layout, training=asked.training, pins=asked.pins)
    saved = most_saved_bytes(layout, model=asked.model, training=asked.training)
    available = asked.available_bytes
    if pieces is None or at_least_bytes - saved > available:
        return None
    return pieces if needed_bytes(asked, pieces, enough_bytes=available) <= available else None


def fewest_blocks(asked: Question, layout: Layout) -> int | None:
    """Of `layout`, which fits with all blocks of a stage recomputed, the fewest with which it does;
    None where none fewer do.

    More recomputed blocks never need more memory, so the border lies between one number that does
    not fit and one that does; memory is about a straight line between them.
    """
    most = max(layout_stage_blocks(model=asked.model, layout=layout))
    available = asked.available_bytes
    whole = replace(layout, activation_checkpointing="none", checkpoint_blocks="all")
    low, low_bytes = 0, needed_bytes(asked, whole)
    high, high_bytes = most, needed_bytes(asked, layout)
    while high - low > 1:
        share = (low_bytes - available) / max(1, low_bytes - high_bytes)
        middle = min(high - 1, max(low + 1, round(low + share * (high - low) + 0.5)))
        needed = needed_bytes(asked, replace(layout, checkpoint_blocks=middle))
        if needed <= available:
            high, high_bytes = middle, needed
        else:
            low, low_bytes = middle, needed
    return high if high < most else None


def needed_bytes(asked: Question, layout: Layout, *, enough_bytes: int | None = None) -> int:
    """Device memory of the fullest rank: of equal ranks, that with most in flight.

    With `enough_bytes` that of the first rank that needs more than that, if any does.
    """
    stages = pipeline_ranks(model=asked.model, layout=layout)
    in_flight = in_flight_blocks(model=asked.model, layout=layout)
    most: dict[Stage, int] = {}
    for stage, blocks in zip(stages, in_flight, strict=True):
        most[stage] = max(blocks, most.get(stage, 0))
    needed = 0
    for stage, blocks in most.items():
        memory = stage_memory(
            model=asked.model,
            cluster=asked.cluster,
            training=asked.training,
            layout=layout,
            stage=stage,
            in_flight_blocks=blocks,
        )
        needed = max(needed, memory.peak_device_bytes)
        if enough_bytes is not None and needed > enough_bytes:
            break
    return needed


def number_of_layouts(asked: Question, d: Degrees) -> int:
    """How many layouts there are with these degrees, each way to recompute counted."""
    return sum(len(leaves) for leaves in _leaves(asked, d)) * len(asked.modes)


def _leaves(asked: Question, d: Degrees) -> Iterator[list[Layout]]:
    """Layouts of one micro-batch and schedule, without recomputation, by growing memory."""
    pins, cluster, training = asked.pins, asked.cluster, asked.training
    for micro_batch in micro_batches(training=training, data_parallel=d.data_parallel, pins=pins):
        number = max(1, training.global_batch // (d.data_parallel * micro_batch))
        for schedule, virtual_stages in schedules(
            d=d, model=asked.model, num_microbatches=number, pins=pins
        ):
            leaves = [
                layout_of(
                    d,
                    micro_batch=micro_batch,
                    num_microbatches=number,
                    reshard=reshard,
                    sync=sync,
                    schedule=schedule,
                    virtual_stages=virtual_stages,
                    compiled=asked.compiled,
                    pins=pins,
                )
                for reshard in reshard_policies(d=d, cluster=cluster, pins=pins)
                for sync in sync_policies(d=d, num_microbatches=number, pins=pins)
            ]
            if leaves:
                yield leaves
