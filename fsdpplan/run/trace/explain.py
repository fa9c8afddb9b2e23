"""Explain: which input of the cost model, with which value, would predict what was measured.

    least over one input x of  sum over kinds k |measured_k - predicted_k(x)|

Kinds are those of a step's work, its collectives by axis, and what it waits. An
input that moves one kind as it was measured and others as they were not is no explanation, so it is
judged by all of them; what is left is a share of all differences. One input at a time: of two that
are both wrong, each leaves what is the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, inf, log

from fsdpplan.cost.estimate import step_time
from fsdpplan.cost.kernels.gradients import gradient_seconds
from fsdpplan.cost.model.shards import gradient_syncs
from fsdpplan.cost.read.pipeline import pipeline_parts
from fsdpplan.cost.schedule.stages import layout_rank_stages, pipeline_ranks, pipeline_stages
from fsdpplan.cost.timeline.pieces import block_pieces, end_pieces, own_blocks
from fsdpplan.cost.traffic.calls import call_seconds
from fsdpplan.cost.traffic.fsdp import fsdp_units
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.errors import SpecError
from fsdpplan.search.advice.sensitivity import rates_and_constants, with_value
from fsdpplan.spec.plan import Case

WAITING = "waiting"
"""Exposed communication and idle time: what is not computed."""

Kinds = dict[str, float]
"""Seconds of a step by kind."""

MOST_FACTOR = 64.0
"""By which an input may be off."""

PROBE = 1.05
"""By which each is moved to see what it moves."""

TRIED = 10
"""Inputs that are looked at closely, of those that a straight line says explain most."""

_GRID = 13
"""Values of an input that are tried, closer to each other near the one that it has."""
_GOLDEN = 18
"""Narrowings of the best stretch of the grid, each to 0.618 of it."""
_PLATEAU = 1e-3
"""Of all differences: what leaves as little more explains as much."""

ROUNDING = 1e-6
"""Share of a step below which nothing differs: traces have numbers in microseconds."""

ALIKE = 0.01
"""Inputs that leave no more than this share of all differences beyond the best one explain as
much: of a rate that is a product, its factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """An input with another value."""

    field: str
    value: float
    """What the plan has."""
    explaining_value: float
    """What would predict what was measured."""
    left_fraction: float
    """Share of all differences that this leaves."""
    also: tuple[str, ...] = ()
    """Inputs that explain as much."""


def step_kinds(case: Case, rank: int) -> Kinds:
    """Seconds of one pipeline rank's step by kind, without laying it out.

    What runs beside nothing follows from the rest: waiting = step - computed.
    """
    time = step_time(case).time
    stage = pipeline_ranks(model=case.model, layout=case.layout)[rank]
    sums = _computed(case, rank)
    busiest = _busiest(case)
    whole = sum((sums if busiest == rank else _computed(case, busiest)).values())
    factor = time.compute_seconds / whole if whole else 1.0
    sums.pop("launch", None)
    sums = {kind: factor * seconds for kind, seconds in sums.items()}
    sums["optimizer"] = time.optimizer_seconds
    sums[WAITING] = time.total_seconds - sum(sums.values())
    for call in step_calls(case, stage):
        name = f"{call.collective} over {call.group.axis}"
        sums[name] = sums.get(name, 0.0) + call_seconds(call, case.cluster)
    return sums


def _computed(case: Case, rank: int) -> Kinds:
    """What a rank computes, before what collectives and the slowest device take from it."""
    layout, sums = case.layout, Kinds()
    stages = pipeline_stages(model=case.model, layout=layout)
    for index in layout_rank_stages(layout)[rank] if layout.pp > 1 else (0,):
        stage = stages[index]
        passes = [block_pieces(own) for own in own_blocks(case, stage)]
        for each in (*passes, end_pieces(case, stage)):
            for piece in (*each.forward, *each.backward):
                if not piece.calls:
                    more = layout.num_microbatches * piece.seconds
                    sums[piece.kind] = sums.get(piece.kind, 0.0) + more
        if layout.sharding == "fsdp" and layout.pp == 1:
            moves = fsdp_units(case, stage)
            copied = layout.num_microbatches * moves.copied
            sums["copy"] = copied + gradient_syncs(layout) * moves.copied_in
    held = pipeline_ranks(model=case.model, layout=layout)
    added = max(gradient_seconds(case, one) for one in dict.fromkeys(held))
    sums["elementwise"] = sums.get("elementwise", 0.0) + added
    return sums


def _busiest(case: Case) -> int:
    """The pipeline rank that the step is priced by."""
    return pipeline_parts(case).rank if case.layout.pp > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What was predicted and measured of a step, and how predictions follow inputs."""

    case: Case
    rank: int
    predicted: Kinds
    measured: Kinds
    base: Kinds
    """`step_kinds` of the case: predictions move as it does."""

    def at(self, case: Case) -> Kinds:
        """What would be predicted of a case."""
        now = step_kinds(case, self.rank)
        return {
            kind: seconds * now.get(kind, 0.0) / self.base[kind] if self.base.get(kind) else seconds
            for kind, seconds in self.predicted.items()
        }

    def left_seconds(self, predicted: Mapping[str, float]) -> float:
        """All differences, none against another."""
        kinds = {*self.measured, *predicted}
        return sum(abs(self.measured.get(kind, 0.0) - predicted.get(kind, 0.0)) for kind in kinds)


def explanations(
    case: Case,
    rank: int,
    *,
    predicted: Kinds,
    measured: Kinds,
    say: Callable[[str], None] = lambda what: None,
) -> list[Explanation]:
    """Inputs that explain differences, each by itself, the one that leaves least first; those that
    leave all of them are not among them."""
    of = Differences(
        case=case, rank=rank, predicted=predicted, measured=measured, base=step_kinds(case, rank)
    )
    whole = of.left_seconds(predicted)
    if whole <= ROUNDING * sum(predicted.values()):
        return []
    found = []
    say("the input that explains them best")
    for field, value, straight in _promising(of):
        factor, left = _best_factor(of, field, value, straight)
        if left < whole * (1 - ALIKE):
            found.append(
                Explanation(
                    field=field,
                    value=value,
                    explaining_value=value * factor,
                    left_fraction=left / whole,
                )
            )
    return _in_order(found)


def _in_order(found: list[Explanation]) -> list[Explanation]:
    """The best first: of those that leave as much the one that is least far off, which names the
    others."""
    ordered: list[Explanation] = []
    left = sorted(found, key=lambda one: one.left_fraction)
    while left:
        alike = [one for one in left if one.left_fraction <= left[0].left_fraction + ALIKE]
        first = min(alike, key=lambda one: abs(log(one.explaining_value / one.value)))
        others = tuple(one.field for one in alike if one is not first)
        ordered.append(replace(first, also=others))
        left = [one for one in left if one not in alike]
    return ordered


def _promising(of: Differences) -> list[tuple[str, float, float]]:
    """(field, value, log of the factor that a straight line says) of those that move the kinds
    most as they were measured."""
    kinds = sorted({*of.predicted, *of.measured})
    wanted = {k: of.measured.get(k, 0.0) - of.predicted.get(k, 0.0) for k in kinds}
    scored = []
    for field, value in rates_and_constants(of.case):
        for probe in (PROBE, 1 / PROBE):
            try:
                moved = of.at(with_value(of.case, field, value * probe))
            except SpecError:
                continue
            slope = {k: (moved.get(k, 0.0) - of.predicted.get(k, 0.0)) / log(probe) for k in kinds}
            square = sum(each * each for each in slope.values())
            if square <= 1e-24 * max(1e-12, sum(of.predicted.values())) ** 2:
                continue
            along = sum(wanted[k] * slope[k] for k in kinds) / square
            most = log(MOST_FACTOR)
            along = max(-most, min(most, along))
            # of a rate, time goes by its inverse, which no line follows far: judge by direction
            dot = sum(wanted[k] * slope[k] for k in kinds)
            norm = (square * sum(each * each for each in wanted.values())) ** 0.5
            scored.append((-abs(dot) / norm if norm else 0.0, field, value, along))
            break
    scored.sort()
    return [(field, value, along) for _, field, value, along in scored[:TRIED]]


def _best_factor(of: Differences, field: str, value: float, straight: float) -> tuple[float, float]:
    """(factor, what is left) of the value that explains most, by a grid and golden sections; where
    more of it changes nothing any more, of the least that does it."""

    def left(place: float) -> float:
        try:
            return of.left_seconds(of.at(with_value(of.case, field, value * exp(place))))
        except (SpecError, OverflowError):
            return inf

    most = log(MOST_FACTOR)
    side = 1.0 if straight >= 0 else -1.0
    places = sorted({side * most * (step / (_GRID - 1)) ** 1.5 for step in range(_GRID)})
    lefts = [left(place) for place in places]
    at = min(range(len(places)), key=lambda index: lefts[index])
    low, high = places[max(0, at - 1)], places[min(len(places) - 1, at + 1)]
    least, best = min(_lowest(left, low, high), (lefts[at], places[at]))
    enough = least + _PLATEAU * lefts[places.index(0.0)]
    near = _nearest(left, best, enough)
    if abs(near - best) > 0.05 and (left_near := left(near)) <= enough:
        return exp(near), left_near
    return exp(best), least


def _lowest(left: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """(what is left, place) of the lowest place between two, by golden sections."""
    share = (5**0.5 - 1) / 2
    one, other = high - share * (high - low), low + share * (high - low)
    of_one, of_other = left(one), left(other)
    for _ in range(_GOLDEN):
        if of_one <= of_other:
            high, other, of_other = other, one, of_one
            one = high - share * (high - low)
            of_one = left(one)
        else:
            low, one, of_one = one, other, of_other
            other = low + share * (high - low)
            of_other = left(other)
    return min((of_one, one), (of_other, other))


def _nearest(left: Callable[[float], float], best: float, enough: float) -> float:
    """The place nearest to what the input is that leaves no more than `enough`, by halves."""
    far, near = best, 0.0
    for _ in range(_GOLDEN):
        between = (far + near) / 2
        if left(between) <= enough:
            far = between
        else:
            near = between
        if abs(far - near) < 1e-3:
            break
    return far
