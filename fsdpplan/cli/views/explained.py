"""The terms of a step and of a peak, each with its formula, inputs and source, on one page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fsdpplan.cli.views.difference import difference_document, told_terms, verdict
from fsdpplan.cli.views.render import blocks, wrapped
from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION
from fsdpplan.cost.explained import Explained, Input
from fsdpplan.search.advice.difference import Priced, difference, lost_and_won
from fsdpplan.search.advice.words import degrees, differences
from fsdpplan.search.question import LEAST_HEADROOM_FRACTION
from fsdpplan.spec.plan import Plan, RankedLayout
from fsdpplan.units import format_gib, format_percent, format_seconds

DIGITS = 5
"""Of an input: so many that the term comes out in all of the digits that it is printed with."""

TIES = (
    f"A tie is what is slower than the fastest by no more than the error of the comparison, and by "
    f"{MOST_INDISTINGUISHABLE_FRACTION:.0%} at most. It goes to the simpler layout: the fewest "
    "kinds of parallelism, then the fewest unusual settings, then "
    f"{LEAST_HEADROOM_FRACTION:.0%} of the memory free, then gathers inside a domain of the "
    "network, then the shortest step."
)
"""How a tie is decided (`search.order.Preference`)."""

SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "B/s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")),
    "FLOP": ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")),
    "FLOP/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")),
    "": ((1e9, "billion"), (1e6, "million"), (1.0, "")),
}
"""Unit -> what it is printed in, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is said of a plan beside its prediction."""

    step: tuple[Explained, ...]
    memory: tuple[Explained, ...]
    runners_up: tuple[tuple[RankedLayout, Priced], ...]
    """The next layouts of the plan's list."""
    reason: str
    """Why the plan's layout is the first of its list; empty: that is not known."""
    chosen: Priced


def quantity(value: float, unit: str) -> str:
    """`989.40 TFLOP/s`: whole numbers as they are, others in `DIGITS` digits."""
    size = abs(value)
    if unit == "" and float(value).is_integer() and size < 1e6:
        return f"{int(value):,}"
    scales = SCALES[unit]
    scale, name = next((one for one in scales if size >= one[0]), scales[-1])
    number = value / scale
    if float(number).is_integer() and abs(number) < 1e6:
        text = f"{int(number):,}"
    else:
        text = f"{number:.{DIGITS}g}"
        text = f"{number:.0f}" if "e+" in text else text
    return f"{text} {name}".strip()


def explained_screen(found: Explanation, *, width: int) -> str:
    """The terms of the step, then those of the peak, then what lost the next layouts."""
    shared = _shared((*found.step, *found.memory))
    return blocks(
        wrapped(
            "How the step is made up: each term with its formula, the module that has it, and its "
            "inputs. The terms add up to the step. What a kernel model or a simulation makes of "
            'the inputs is one of them, said to be "left by" it.',
            width=width,
        ),
        _of_all(shared, width),
        _terms(found.step, shared, width),
        wrapped("How the peak of the fullest device is made up, likewise", width=width),
        _terms(found.memory, shared, width),
        wrapped(f"Derived in {', '.join(_chapters(found))}.", width=width),
        wrapped(f"Why this layout: {found.reason}. {TIES}", width=width) if found.reason else "",
        _runners_up(found, width),
    )


def _terms(terms: Sequence[Explained], shared: dict[str, Input], width: int) -> str:
    return "\n".join(_term(term, terms, shared, width) for term in terms)


def _chapters(found: Explanation) -> list[str]:
    """Pages that derive the terms."""
    sources = (term.source.partition("; ")[2] for term in (*found.step, *found.memory))
    return list(dict.fromkeys(sources))


def _shared(terms: Sequence[Explained]) -> dict[str, Input]:
    """Inputs of several terms whose symbol means one thing everywhere."""
    meanings: defaultdict[str, set[Input]] = defaultdict(set)
    uses: defaultdict[str, int] = defaultdict(int)
    for term in terms:
        for one in term.inputs:
            meanings[one.symbol].add(one)
            uses[one.symbol] += 1
    return {
        symbol: next(iter(found))
        for symbol, found in meanings.items()
        if len(found) == 1 and uses[symbol] > 1
    }


def _of_all(shared: dict[str, Input], width: int) -> str:
    if not shared:
        return ""
    return wrapped(_inputs(shared.values()), width=width, first="  in several: ")


def _inputs(inputs: Iterable[Input]) -> str:
    return "; ".join(
        f"{one.symbol} = {quantity(one.value, one.unit)}, {one.words}" for one in inputs
    )


def _term(
    term: Explained, all_terms: Sequence[Explained], shared: dict[str, Input], width: int
) -> str:
    shown = format_seconds if term.unit == "s" else format_gib
    whole = sum(one.value for one in all_terms)
    share = format_percent(term.value / whole) if whole else ""
    own = [one for one in term.inputs if one.symbol not in shared]
    module, _, _ = term.source.partition(";")
    lines = [
        wrapped(f"{term.name}: {shown(term.value)}, {share}", width=width, first="  "),
        wrapped(f"= {term.formula}  ({module})", width=width, first="    "),
    ]
    if own:
        lines.append(wrapped(_inputs(own), width=width, first="    "))
    return "\n".join(lines)


def _runners_up(found: Explanation, width: int) -> str:
    if not found.runners_up:
        return ""
    heading = "The next layouts, and the terms that lost or won them time in a step"
    lines = [wrapped(heading, width=width)]
    for ranked, priced in found.runners_up:
        own = found.chosen.case.layout
        words = "; ".join((degrees(ranked.layout), *differences(ranked.layout, own)))
        lines.append(wrapped(words, width=width, first=f"  {ranked.rank:>2}  "))
        told = told_terms(found.chosen, priced)
        if told:
            lines.append(wrapped(f"{told}.", width=width, first="      "))
        lines.append(
            wrapped(verdict(difference(found.chosen, priced)), width=width, first="      ")
        )
        lines.append(wrapped(f"{ranked.reason}.", width=width, first="      "))
    return "\n".join(lines)


MOST_RUNNERS_UP = 4


def runners_up(plan: Plan) -> tuple[tuple[RankedLayout, Priced], ...]:
    """The next `MOST_RUNNERS_UP` of the plan's list."""
    others = [one for one in plan.alternatives if one.layout != plan.layout]
    return tuple(
        (one, Priced(case=replace(plan.case, layout=one.layout), estimate=one.estimate))
        for one in others[:MOST_RUNNERS_UP]
    )


def explained_document(found: Explanation) -> dict[str, Any]:
    """The same as JSON has it."""
    return {
        "step_terms": [asdict(term) for term in found.step],
        "memory_terms": [asdict(term) for term in found.memory],
        "runners_up": [
            {
                "rank": ranked.rank,
                "lost": [asdict(term) for term in lost],
                "won": [asdict(term) for term in won],
                **difference_document(difference(found.chosen, priced)),
            }
            for ranked, priced in found.runners_up
            for lost, won in (lost_and_won(found.chosen, priced),)
        ],
    }
