"""Space: the layouts of one question, made as they are asked for, and what was seen of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fsdpplan.cost.estimate import estimate, step_time
from fsdpplan.cost.schedule.stages import most_stages
from fsdpplan.search.bounds.fitting import (
    TOO_LARGE,
    Fitting,
    Tally,
    needed_bytes,
    number_of_layouts,
)
from fsdpplan.search.bounds.floors import Floors, PhasedFloors, floors_of
from fsdpplan.search.bounds.room import Room
from fsdpplan.search.enumerate import Degrees, degrees
from fsdpplan.search.order import Entry
from fsdpplan.search.question import Question
from fsdpplan.search.rules.legality import degrees_problem, first_problem
from fsdpplan.search.rules.program import program_pins
from fsdpplan.search.rules.rule import Problem
from fsdpplan.search.variants import overlapped, reshards
from fsdpplan.spec.layout import Layout


@dataclass(slots=True)
class Space:
    """Private to one search."""

    asked: Question
    tally: Tally = field(default_factory=Tally)
    room: Room = field(init=False)
    floors: Floors | PhasedFloors = field(init=False)
    priced: list[Entry] = field(default_factory=list)
    """All that was estimated."""
    closest: Layout | None = None
    """What comes nearest to fitting where nothing does; None where none is legal."""
    problems: dict[tuple[object, ...], Problem | None] = field(default_factory=dict)
    """What degrees break."""
    numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    """Of layouts, by what decides it."""
    unfit: list[tuple[Degrees, Sequence[int]]] = field(default_factory=list)
    """Micro-batches with which nothing fits, and the tally does not know of."""

    def __post_init__(self) -> None:
        pins = program_pins(self.asked.pins, self.asked.training.program)
        self.asked = replace(self.asked, pins=pins)
        self.room = Room(self.asked.phases[0][1])
        self.floors = floors_of(self.asked, self.room)

    def of_bytes(self, most_bytes: int, asked: Question) -> Space:
        """The layouts of `asked`, the same question or one with a learner, if `most_bytes` are
        planned with: what was computed of them here is kept."""
        other = Space(replace(asked, most_bytes=most_bytes))
        other.room = self.room.of_bytes(most_bytes)
        other.floors = self.floors.in_room(other.room, least_factor=asked.least_factor)
        other.problems, other.numbers = self.problems, self.numbers
        return other

    def spreads(self) -> Iterator[Degrees]:
        """Every way to spread the ranks that may work."""
        asked = self.asked
        most = most_stages(asked.model.layers)
        for d in degrees(
            model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
        ):
            if asked.training.global_batch % d.data_parallel:
                self.tally.reject("global batch is not a multiple of the data-parallel ranks")
            elif d.pp * (asked.pins.virtual_stages or 1) > most:
                self.tally.reject("more pipeline stages than blocks")
            elif broken := self._broken(d):
                self.tally.break_rule(broken, self.number(d))
            else:
                yield d

    def _broken(self, d: Degrees) -> Problem | None:
        """What its degrees break, whatever the policies."""
        key = (d.tp, d.cp, d.ep, d.experts_over_tp, d.sharding)
        if key not in self.problems:
            self.problems[key] = degrees_problem(self.asked.case(self.floors.leanest(d)))
        return self.problems[key]

    def number(self, d: Degrees) -> int:
        """How many layouts there are with these degrees."""
        key = self._decides_number(d)
        if key not in self.numbers:
            self.numbers[key] = self.number_with(d, self.floors.sizes(d))
        return self.numbers[key]

    def number_with(self, d: Degrees, sizes: Sequence[int]) -> int:
        """How many of them there are with these micro-batches."""
        decides = self._decides_number(d)
        for size in sizes:
            if (*decides, size) not in self.numbers:
                self.numbers[*decides, size] = number_of_layouts(self.asked, d, size)
        return sum(self.numbers[*decides, size] for size in sizes)

    def _decides_number(self, d: Degrees) -> tuple[object, ...]:
        policies = len(reshards(self.asked, d))
        return (d.pp, d.data_parallel, d.dp_replicate > 1, d.sharding, policies)

    def rule_out(self, d: Degrees, layout: Layout, number: int) -> None:
        """None of `number` layouts with these degrees fits; `layout` is one of those that need
        least."""
        broken = self._problem(layout)
        if broken is None:
            self.tally.reject(TOO_LARGE, number)
            self.tally.missed(d)
        else:
            self.tally.break_rule(broken, number)

    def rule_out_spread(self, d: Degrees) -> None:
        """Nothing with these degrees fits."""
        self.rule_out(d, self.floors.leanest(d), self.number(d))

    def rule_out_sizes(self, d: Degrees, sizes: Sequence[int]) -> None:
        """Nothing with these degrees fits with one of these micro-batches: told to the tally in the
        end."""
        if sizes:
            self.unfit.append((d, sizes))

    def count_unfit(self) -> None:
        """Tell the tally what was ruled out: of each micro-batch where nothing at all fits, else of
        all but the largest, with which nothing accumulates."""
        for d, sizes in self.unfit:
            each = [[size] for size in sizes]
            for some in (sizes[:-1], sizes[-1:]) if self.tally.feasible else each:
                if some:
                    self.rule_out(d, self.floors.plain(d, some[0]), self.number_with(d, some))
        self.unfit.clear()

    def fitting(self, d: Degrees) -> Fitting:
        """The layouts with these degrees."""
        return Fitting(self.asked, d, self.tally, self.room)

    def layouts(self, d: Degrees) -> Iterator[Layout]:
        """What fits of them, with the usual settings."""
        found = self.fitting(d)
        for size in self.floors.sizes(d):
            for leaf in found.leaves(size):
                yield from self.settled(found, leaf)

    def settled(self, found: Fitting, leaf: Layout) -> Iterator[Layout]:
        """What fits of one of them, with its collectives overlapped or not."""
        for layout in found.settled(leaf):
            yield layout
            yield from overlapped(self.asked, layout)

    def floor(self, layout: Layout) -> float:
        """The step."""
        asked = self.asked
        step = step_time(asked.case(layout))
        return asked.least_factor * step.time.total_seconds

    def is_below(self, layout: Layout, seconds: float) -> bool:
        """Whether it may take less, looked at no closer than it must be."""
        return self.may_be_below(layout, seconds) and self.floor(layout) < seconds

    def is_better(self, layout: Layout, seconds: float) -> bool:
        """Whether it fits, which is cheaper to say than its step, and may take less."""
        return (
            self.may_be_below(layout, seconds)
            and self.fits(layout)
            and self.floor(layout) < seconds
        )

    def may_be_below(self, layout: Layout, seconds: float) -> bool:
        """Whether it may take less by its floors."""
        return self.is_hopeful(layout, seconds) and self.floors.played(layout) < seconds

    def is_hopeful(self, layout: Layout, seconds: float) -> bool:
        """The same by the cheapest of them."""
        return self.floors.of_settled(layout) < seconds

    def is_legal(self, layout: Layout) -> bool:
        """Whether it can be trained."""
        return self._problem(layout) is None

    def _problem(self, layout: Layout) -> Problem | None:
        return first_problem(self.asked.case(layout))

    def fits(self, layout: Layout) -> bool:
        """Whether every rank has room for it."""
        available = self.asked.available_bytes
        return needed_bytes(self.asked, layout, enough_bytes=available) <= available


def entry_of(asked: Question, layout: Layout) -> Entry:
    """A layout with its estimate, as measured runs say where there are any."""
    found = estimate(asked.case(layout))
    return layout, found if asked.learner is None else asked.learner.corrected(layout, found)
