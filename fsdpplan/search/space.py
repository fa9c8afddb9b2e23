"""Space: the layouts of one question, made as they are asked for, and what was seen of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from fsdpplan.cost.least import least_pipeline_seconds, least_update_seconds
from fsdpplan.cost.step import estimate
from fsdpplan.cost.step_time import step_time
from fsdpplan.search.enumerate import Degrees, degrees
from fsdpplan.search.fitting import TOO_LARGE, Tally, fitting, hopeless, needed_bytes
from fsdpplan.search.floors import Floors
from fsdpplan.search.legality import first_problem
from fsdpplan.search.order import Entry
from fsdpplan.search.question import Question
from fsdpplan.search.room import Room
from fsdpplan.search.rule import Problem
from fsdpplan.search.variants import overlapped
from fsdpplan.spec.layout import Layout


@dataclass(slots=True)
class Space:
    """Private to one search."""

    asked: Question
    tally: Tally = field(default_factory=Tally)
    room: Room = field(init=False)
    floors: Floors = field(init=False)

    def __post_init__(self) -> None:
        self.room = Room(self.asked)
        self.floors = Floors(self.asked, self.room)

    def spreads(self) -> Iterator[tuple[Degrees, float]]:
        """Every way to spread the ranks that may work, with a floor of its steps."""
        asked = self.asked
        for d in degrees(
            model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
        ):
            reason = hopeless(asked, d)
            if reason is not None:
                self.tally.reject(reason)
                continue
            floor = self.floors.of_spread(d)
            if floor < inf:
                yield d, floor
            else:
                self._rule_out(self.floors.leanest(d))

    def _rule_out(self, leanest: Layout) -> None:
        """Nothing with the degrees of `leanest` fits, if it is legal."""
        broken = self._problem(leanest)
        if broken is None:
            self.tally.reject(TOO_LARGE)
            least = self.room.least_bytes(leanest)
            self.tally.missed(self.asked, leanest, at_least_bytes=least)
        else:
            self.tally.break_rule(broken)

    def layouts(self, d: Degrees) -> Iterator[Layout]:
        """What fits of one of them, with the usual settings."""
        for layout in fitting(self.asked, d, self.tally, self.room):
            yield layout
            yield from overlapped(self.asked, layout)

    def floor(self, layout: Layout) -> float:
        """The step without a pipeline; less than it with one."""
        asked = self.asked
        given = {"model": asked.model, "cluster": asked.cluster, "training": asked.training}
        if layout.pp == 1:
            return step_time(layout=layout, **given).time.total_seconds  # type: ignore[arg-type]
        way = least_pipeline_seconds(layout=layout, **given)  # type: ignore[arg-type]
        return way + least_update_seconds(layout=layout, **given)  # type: ignore[arg-type]

    def is_legal(self, layout: Layout) -> bool:
        """Whether it can be trained."""
        return self._problem(layout) is None

    def _problem(self, layout: Layout) -> Problem | None:
        asked = self.asked
        return first_problem(
            model=asked.model, cluster=asked.cluster, training=asked.training, layout=layout
        )

    def fits(self, layout: Layout) -> bool:
        """Whether every rank has room for it."""
        available = self.asked.available_bytes
        return needed_bytes(self.asked, layout, enough_bytes=available) <= available


def entry_of(asked: Question, layout: Layout) -> Entry:
    """A layout with its estimate."""
    return layout, estimate(
        model=asked.model, cluster=asked.cluster, training=asked.training, layout=layout
    )
