"""Frontier: all layouts that a search priced, by the step and the memory of each, and which of them
no other one beats in both.

A search prices what may be among the fastest. So that the chart has more than those, it lists the
fastest of many ways to spread the ranks, and is asked again with a quarter less memory each time
(`search.objective.leaner`), until a step takes twice that of the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdpplan.cost.band import expected_peak_bytes
from fsdpplan.cost.schedule.stages import named_stages
from fsdpplan.report.values import Cell, Chart, Section, Table, band_words, cell
from fsdpplan.search.advice.words import chance_words, degrees, name, policy
from fsdpplan.search.objective import leaner
from fsdpplan.search.order import Entry, is_tied, seconds
from fsdpplan.search.question import Question, SearchResult
from fsdpplan.search.recommend import difference_of, recommend
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Estimate, Plan
from fsdpplan.units import format_gib, format_percent, format_seconds

LISTED = 64
"""Ways to spread the ranks of which the fastest is priced."""

SLOWEST = 2.0
"""Times the fastest: what takes longer is not drawn."""

ROOM_STEP = 0.25
"""Of the device's memory, that is left free in steps: each takes a search."""

MOST_ROWS = 24
"""Of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A layout on the chart."""

    layout: Layout
    estimate: Estimate
    peak_bytes: float
    """Of the fullest device, as expected."""
    is_chosen: bool = False
    is_tied: bool = False
    """Not told apart from the fastest."""
    is_best: bool = False
    """No other one is faster with no more memory."""

    @property
    def step_seconds(self) -> float:
        """As expected."""
        return self.estimate.step_seconds.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What a search, and those with less memory, came upon."""

    drawn: tuple[Drawn, ...]
    """By growing memory."""
    slower: int
    """Layouts that were priced and are too slow to be drawn."""
    candidates: int
    """Of the first search, as what follows."""
    feasible: int
    pruned: int
    rejected: int
    searches: int


def explored(plan: Plan, question: Question, *, say: Callable[[str], None]) -> Explored | None:
    """All that is priced where `question`, that of `plan`, is asked again; None where nothing fits.
    `say` is told what is searched."""
    say("all ways to spread the ranks")
    first = _listed(question)
    if not first.ranked:
        return None
    found = [first, *_leaner(question, first, say)]
    entries = {
        named_stages(model=question.model, layout=layout): estimate
        for result in reversed(found)
        for layout, estimate in (*_ranked(result), *result.explored)
    }
    fastest = min(entries.items(), key=seconds)
    entries[plan.layout] = plan.estimate
    kept = [entry for entry in entries.items() if seconds(entry) <= SLOWEST * seconds(fastest)]
    kept += [(plan.layout, plan.estimate)] if plan.layout not in dict(kept) else []
    return Explored(
        drawn=_drawn(kept, fastest, plan, question),
        slower=len(entries) - len(kept),
        candidates=first.candidates,
        feasible=first.feasible,
        pruned=first.pruned,
        rejected=sum(number for _, number in first.rejected),
        searches=len(found),
    )


def _listed(question: Question) -> SearchResult:
    return recommend(
        model=question.model,
        cluster=question.cluster,
        training=question.training,
        pins=question.pins,
        limit=LISTED,
        learner=question.learner,
    )


def _leaner(
    question: Question, first: SearchResult, say: Callable[[str], None]
) -> Iterator[SearchResult]:
    fastest = first.fastest_seconds
    assert fastest is not None
    peak = first.ranked[0].estimate.memory.peak_device_bytes
    say(f"layouts that need less than {format_gib(peak)}")
    for found in leaner(question, first, step=ROOM_STEP):
        best = found.ranked[0].estimate
        if best.step_seconds.expected > SLOWEST * fastest:
            return
        yield found
        say(f"layouts that need less than {format_gib(best.memory.peak_device_bytes)}")


def _ranked(result: SearchResult) -> Iterator[Entry]:
    return ((one.layout, one.estimate) for one in result.ranked)


def _drawn(
    entries: list[Entry], fastest: Entry, plan: Plan, question: Question
) -> tuple[Drawn, ...]:
    difference = difference_of(question.cluster, question.learner)
    found = [
        Drawn(
            layout=entry[0],
            estimate=entry[1],
            peak_bytes=expected_peak_bytes(entry[1].memory, question.cluster.device),
            is_chosen=entry[0] == plan.layout,
            is_tied=is_tied(entry, fastest, difference),
        )
        for entry in entries
    ]
    found.sort(key=lambda one: (one.peak_bytes, one.step_seconds))
    least = float("inf")
    marked = []
    for one in found:
        marked.append(replace(one, is_best=one.step_seconds < least))
        least = min(least, one.step_seconds)
    return tuple(marked)


def frontier_section(plan: Plan, found: Explored | None) -> Section | None:
    """The section; None where a search finds nothing that fits."""
    if found is None:
        return None
    return Section(
        name="frontier",
        title="Every layout that was priced",
        says=_searched_words(found),
        blocks=(_chart(plan, found),),
    )


def _searched_words(found: Explored) -> str:
    too_slow = ""
    if found.slower:
        too_slow = (
            f" {found.slower:,} more were priced and take over {SLOWEST:g} times as long as the "
            "fastest."
        )
    again = ""
    if found.searches > 1:
        again = (
            f" {found.searches - 1} more searches with less and less memory give the rest of the "
            "line."
        )
    return (
        f"{found.candidates:,} layouts were searched. {found.rejected:,} cannot be trained or do "
        f"not fit, {found.pruned:,} were left out because even the least that they can take is too "
        f"slow; of what fits, what may be the fastest of its kind was priced.{again} The "
        f"{len(found.drawn):,} layouts of the chart are these.{too_slow}"
    )


def _chart(plan: Plan, found: Explored) -> Chart:
    groups = {
        "this plan": [one for one in found.drawn if one.is_chosen],
        "best for its memory": [one for one in found.drawn if one.is_best and not one.is_chosen],
        "a tie with the fastest": [
            one for one in found.drawn if one.is_tied and not (one.is_best or one.is_chosen)
        ],
        "others": [one for one in found.drawn if not (one.is_tied or one.is_best or one.is_chosen)],
    }
    memory = plan.cluster.device.memory_bytes
    return Chart(
        name="frontier",
        kind="points",
        title="Step by memory: further down is faster, further left leaves more memory free",
        says=_says(found),
        data={
            "x": {"name": "peak of the fullest device", "unit": "bytes", "max": memory},
            "y": {"name": "a step", "unit": "seconds"},
            "series": [
                {
                    "name": name,
                    "points": [_point(one) for one in group],
                    "color": index,
                    "size": 16 if name == "this plan" else 10 if index < 3 else 8,
                    "faint": name == "others",
                }
                for index, (name, group) in enumerate(groups.items())
                if group
            ],
            "marks": [
                {"axis": "x", "value": memory, "name": "all of the device", "align": "right"}
            ],
        },
        table=_table(found),
    )


def _says(found: Explored) -> str:
    best = [one for one in found.drawn if one.is_best]
    leanest, fastest = best[0], best[-1]
    tied = sum(one.is_tied for one in found.drawn)
    words = (
        f"The fastest takes {format_seconds(fastest.step_seconds)}; with bands as wide as these, "
        f"{tied} of {len(found.drawn)} tie with it."
    )
    if leanest is fastest:
        return words
    less = 1 - leanest.peak_bytes / fastest.peak_bytes
    more = leanest.step_seconds / fastest.step_seconds - 1
    return (
        f"{words} The leanest needs {format_percent(less)} less memory than the fastest, for a "
        f"step that takes {format_percent(more)} longer. Lines are 80 % bands."
    )


def _point(one: Drawn) -> dict[str, Any]:
    step = one.estimate.step_seconds
    band = {"lower": step.lower, "upper": step.upper} if one.is_best or one.is_chosen else {}
    return {
        "x": one.peak_bytes,
        "y": step.expected,
        **band,
        "name": f"{name(one.layout)}: {degrees(one.layout)}",
        "details": [
            ["80 % band", band_words(step)],
            ["tokens a second", f"{one.estimate.tokens_per_second:,.0f}"],
            ["MFU", format_percent(one.estimate.mfu_fraction)],
            *([["fits", fits]] if (fits := _fits(one.estimate)) else []),
            ["micro-batch", f"{one.layout.micro_batch} x {one.layout.num_microbatches}"],
            ["policy", policy(one.layout)],
        ],
    }


def _fits(estimate: Estimate) -> str:
    chance = estimate.memory.fits_fraction
    return "" if chance is None else chance_words(chance)


def _table(found: Explored) -> Table:
    """The line of the best, and the plan; then what is not told apart from the fastest."""
    first = [one for one in found.drawn if one.is_best or one.is_chosen]
    others = [one for one in found.drawn if one.is_tied and one not in first]
    others.sort(key=lambda one: one.step_seconds)
    rows = (*sorted(first, key=lambda one: one.step_seconds), *others)[:MOST_ROWS]
    return Table(
        caption="The plan, the best for its memory, and what ties with the fastest",
        columns=("layout", "step", "band", "peak", "fits", "MFU", "what it is"),
        rows=tuple(_row(one) for one in rows),
        folded=True,
    )


def _row(one: Drawn) -> tuple[Cell | str, ...]:
    step = one.estimate.step_seconds
    words = (
        "this plan" if one.is_chosen else "",
        "best for its memory" if one.is_best else "",
        "a tie with the fastest" if one.is_tied else "",
    )
    return (
        f"{degrees(one.layout)}; {policy(one.layout)}",
        cell(step.expected, "seconds"),
        band_words(step),
        cell(one.peak_bytes, "bytes"),
        Cell(_fits(one.estimate), one.estimate.memory.fits_fraction),
        cell(one.estimate.mfu_fraction, "fraction"),
        ", ".join(word for word in words if word),
    )
