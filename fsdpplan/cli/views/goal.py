"""Time, money and energy: of one training in lines, of several answers as a table, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, NotRequired, TypedDict

from fsdpplan.cli.resolve.goal import Answer, Goal, Tried, bill_of
from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.cost.bill import Bill, chance_in_time, seconds_of_chance
from fsdpplan.errors import NoFeasibleLayout
from fsdpplan.files.plans import LayoutJson, layout_document
from fsdpplan.search.advice.words import chance_words, degrees, differences
from fsdpplan.search.objective import meets
from fsdpplan.spec.plan import Interval, Terms
from fsdpplan.units import (
    format_count,
    format_gib,
    format_gpu_hours,
    format_kwh,
    format_money,
    format_percent,
    format_seconds,
)

DAY_SECONDS = 86400


def bill_lines(found: Bill | None, goal: Goal, terms: Terms) -> list[tuple[str, str]]:
    """What the whole training takes, a line each; what was not asked has none."""
    if found is None:
        return []
    hours = f"{format_gpu_hours(found.gpu_hours.expected)} on {_gpus(found.gpus)}"
    pairs = [("GPU hours", hours)]
    if found.cost is not None:
        assert terms.price is not None
        each = format_money(terms.price)
        pairs.append(("cost", f"{_banded(found.cost, format_money)} at {each} a GPU hour"))
    if found.energy_kwh is not None:
        words = f"{_banded(found.energy_kwh, format_kwh)}, PUE {terms.pue:g}"
        pairs.append(("energy", words))
    if found.co2_kg is not None:
        grams = f"{terms.co2_grams_per_kwh:g} g a kWh"
        pairs.append(("CO2", f"{_banded(found.co2_kg.scaled(1e-3), _tonnes)} at {grams}"))
    if found.deadline_chance is not None:
        assert terms.deadline_seconds is not None
        span = format_seconds(terms.deadline_seconds)
        met = "met" if found.deadline_chance >= goal.chance else "NOT MET"
        chance = chance_words(found.deadline_chance)
        asked = f"{chance_words(goal.chance)} are asked for, --deadline-chance"
        pairs.append(("deadline", f"{span}: {met}, with a chance of {chance} ({asked})"))
    return pairs


def _gpus(gpus: int) -> str:
    return f"{gpus:,} GPU{'' if gpus == 1 else 's'}"


def _banded(value: Interval, words: Callable[..., str]) -> str:
    """A value with its band, all in one unit."""
    lower, expected, upper = (
        words(each, beside=value.expected) for each in (value.lower, value.expected, value.upper)
    )
    return f"{expected} (80 % band {lower} to {upper})"


def _tonnes(tonnes: float, *, beside: float | None = None) -> str:
    del beside
    return f"{tonnes:,.3g} t"


def answer_screen(answer: Answer, *, width: int) -> str:
    """What was looked at beside the best: a line each, those that another one beats marked."""
    if len(answer.tried) == 1 and not answer.left_out:
        return wrapped(_by_rank(answer), width=width)
    by_memory = answer.goal.objective == "headroom"
    objective = answer.goal.best_by
    where = "" if by_memory else ", by number of GPUs"
    heading = (
        f"Best: {objective.words}{_in_time(answer.goal)}, of {len(answer.tried)} looked at{where}. "
        f"Beaten: another one is better in both, {objective.frontier}."
    )
    columns = {name: cell for name, cell in COLUMNS.items() if _is_shown(answer, name)}
    rows = [
        (*(cell(one) for cell in columns.values()), _mark(answer, index))
        for index, one in enumerate(answer.tried)
    ]
    names = [_name(one, by_memory) for one in answer.tried]
    return blocks(
        wrapped(heading, width=width),
        table(
            rows,
            headers=(*columns, ""),
            align=(*("right" for _ in columns), "left"),
            width=width,
        ),
        "\n".join(
            wrapped(_layout(answer, one, by_memory), width=width, first=f"  {name:>14}  ")
            for name, one in zip(names, answer.tried, strict=True)
        ),
        listed("Left out", _left_out(answer), width=width),
    )


def _by_rank(answer: Answer) -> str:
    """With what chance each layout of the list ends in time; nothing where there is no deadline."""
    one, terms = answer.tried[0], answer.terms.value
    bills = [(each.rank, bill_of(one.inputs, each, terms)) for each in one.found.result.ranked]
    chances = [
        f"{rank}: {chance_words(found.deadline_chance)}"
        for rank, found in bills
        if found is not None and found.deadline_chance is not None
    ]
    return f"Chance to end in time, by rank: {', '.join(chances)}." if chances else ""


def _layout(answer: Answer, one: Tried, by_memory: bool) -> str:
    """Its degrees; of layouts on one number of GPUs also in what else it is not the fastest."""
    layout, fastest = one.first.layout, answer.tried[0].first.layout
    other = differences(layout, fastest) if by_memory and one is not answer.tried[0] else ()
    return "; ".join((degrees(layout), *other))


def _left_out(answer: Answer) -> list[str]:
    """What nothing came of, the numbers of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for gpus, why in answer.left_out:
        by_reason.setdefault(why, []).append(f"{gpus:,}")
    return [f"{', '.join(numbers)} GPUs: {why}" for why, numbers in by_reason.items()]


def _in_time(goal: Goal) -> str:
    if goal.bill.deadline is None:
        return ""
    chance = chance_words(goal.chance)
    return f" in {format_seconds(goal.bill.deadline)} with a chance of {chance} or more"


def _name(one: Tried, by_memory: bool) -> str:
    free = format_gib(one.offer.free_bytes)
    return f"{free} free" if by_memory else _gpus(one.offer.gpus)


def _mark(answer: Answer, index: int) -> str:
    if index == answer.chosen:
        return "best"
    if not meets(answer.tried[index].offer, answer.goal.chance):
        return "too late"
    return "" if index in answer.frontier else "beaten"


def _span(one: Tried) -> str:
    found = one.offer.bill
    return "" if found is None else format_seconds(found.seconds.expected)


def _band(one: Tried) -> str:
    found = one.offer.bill
    if found is None:
        return ""
    lower, upper = (
        format_seconds(end, beside=found.seconds.expected)
        for end in (found.seconds.lower, found.seconds.upper)
    )
    return f"{lower.split()[0]} to {upper}"


def _of_bill(read: Callable[[Bill], str]) -> Callable[[Tried], str]:
    return lambda one: "" if one.offer.bill is None else read(one.offer.bill)


COLUMNS: dict[str, Callable[[Tried], str]] = {
    "GPUs": lambda one: f"{one.offer.gpus:,}",
    "step": lambda one: format_seconds(one.first.estimate.step_seconds.expected),
    "free": lambda one: format_gib(one.offer.free_bytes),
    "tokens/s": lambda one: f"{one.offer.tokens_per_second:,.0f}",
    "kept": lambda one: (
        "" if one.offer.kept_fraction == 1 else format_percent(one.offer.kept_fraction)
    ),
    "time": _span,
    "80 % band": _band,
    "GPU hours": _of_bill(lambda found: format_gpu_hours(found.gpu_hours.expected)),
    "cost": _of_bill(lambda found: format_money(found.cost.expected) if found.cost else ""),
    "energy": _of_bill(
        lambda found: format_kwh(found.energy_kwh.expected) if found.energy_kwh else ""
    ),
    "in time": _of_bill(
        lambda found: "" if found.deadline_chance is None else chance_words(found.deadline_chance)
    ),
}
"""What is shown of each answer, by its name."""


def _is_shown(answer: Answer, name: str) -> bool:
    by_memory = answer.goal.objective == "headroom"
    if name == "GPUs":
        return not by_memory
    if name in ("step", "free"):
        return by_memory
    if name == "tokens/s":
        return answer.tried[0].offer.bill is None
    if name == "GPU hours" and answer.terms.value.price is not None:
        return False  # the same but for a factor
    return any(COLUMNS[name](one) for one in answer.tried)


def too_late(answer: Answer) -> NoFeasibleLayout:
    """That nothing ends in time, what comes nearest, and what to type."""
    nearest = max(
        answer.tried, key=lambda one: (chance_in_time(one.offer.bill), one.offer.tokens_per_second)
    )
    numbers = len({one.offer.gpus for one in answer.tried}) + len(answer.left_out)
    words = late_words(
        nearest.offer.bill, answer.goal, nearest.inputs.training.tokens, numbers=numbers
    )
    more = "use more --gpus" if numbers > 1 else "leave --gpus out to have their number found"
    return NoFeasibleLayout(f"{words}, or {more}", rejected={})


def late_words(found: Bill | None, goal: Goal, tokens: int | None, *, numbers: int = 1) -> str:
    """That a training does not end in time, the nearest of so many `numbers` of GPUs, and what to
    type; empty: it does, or nothing was asked."""
    if found is None or goal.bill.deadline is None or tokens is None:
        return ""
    if found.deadline_chance is None or found.deadline_chance >= goal.chance:
        return ""
    many = numbers > 1
    of_all = f", of {numbers} numbers tried, come nearest with" if many else " take"
    later = _days(seconds_of_chance(found.seconds, goal.chance))
    return (
        f"{format_count(tokens)} tokens are not done in {format_seconds(goal.bill.deadline)} with "
        f"a chance of {chance_words(goal.chance)}: {found.gpus:,} GPUs{of_all} "
        f"{_banded(found.seconds, format_seconds)}, and the chance is "
        f"{chance_words(found.deadline_chance)}; use --deadline {later}, a lower --deadline-chance"
    )


def _days(seconds: float) -> str:
    """A deadline as it is typed, rounded up."""
    if seconds < 2 * DAY_SECONDS:
        return f"{math.ceil(seconds / 36) / 100:g}h"
    return f"{math.ceil(seconds / DAY_SECONDS * 10) / 10:g}d"


BillJson = Annotated[dict[str, Any], Bill]


class BillsJson(TypedDict):
    """What is known, and what the training takes with each layout."""

    objective: str
    deadline_chance_asked: float | None
    """Null: no deadline was given."""
    terms: Annotated[dict[str, Any], Terms]
    bills: list[BillJson | None]
    """One a plan, in the same order."""


class TriedJson(TypedDict):
    """A number of GPUs that was looked at."""

    gpus: int
    layout: LayoutJson
    step_seconds: Annotated[dict[str, Any], Interval]
    tokens_per_second: float
    free_bytes: float
    kept_fraction: float | None
    bill: BillJson | None
    in_time: bool
    is_best: bool
    is_beaten: bool
    """Another one is better in all that counts."""


class LeftOutJson(TypedDict):
    """A number of GPUs that cannot be had."""

    gpus: int
    problem: str


class GoalJson(BillsJson):
    """The same of the best answer, and all that were looked at."""

    tried: NotRequired[list[TriedJson]]
    """Of `recommend`."""
    left_out: NotRequired[list[LeftOutJson]]


def bills_document(goal: Goal, terms: Terms, bills: Sequence[Bill | None]) -> BillsJson:
    """What is known, and what the training takes with each layout."""
    return {
        "objective": goal.name,
        "deadline_chance_asked": None if terms.deadline_seconds is None else goal.chance,
        "terms": asdict(terms),
        "bills": [None if one is None else asdict(one) for one in bills],
    }


def answer_document(answer: Answer) -> GoalJson:
    """The same of the best answer, and all that were looked at."""
    best = answer.best
    return {
        **bills_document(
            answer.goal,
            answer.terms.value,
            [bill_of(best.inputs, one, answer.terms.value) for one in best.found.result.ranked],
        ),
        "tried": [
            {
                "gpus": one.offer.gpus,
                "layout": layout_document(one.first.layout),
                "step_seconds": asdict(one.first.estimate.step_seconds),
                "tokens_per_second": one.offer.tokens_per_second,
                "free_bytes": one.offer.free_bytes,
                "kept_fraction": one.offer.kept_fraction,
                "bill": None if one.offer.bill is None else asdict(one.offer.bill),
                "in_time": meets(one.offer, answer.goal.chance),
                "is_best": index == answer.chosen,
                "is_beaten": index not in answer.frontier,
            }
            for index, one in enumerate(answer.tried)
        ],
        "left_out": [{"gpus": gpus, "problem": why} for gpus, why in answer.left_out],
    }
