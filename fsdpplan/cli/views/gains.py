"""Changes that a user can make, the cheapest first, each as it was planned again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypedDict

from fsdpplan.cli.resolve.gains import Kind, Tried
from fsdpplan.cli.views.difference import (
    DifferenceJson,
    PricedJson,
    difference_document,
    priced_document,
)
from fsdpplan.cli.views.render import blocks, listed, wrapped
from fsdpplan.files.plans import SCHEMA_VERSION
from fsdpplan.search.advice.difference import Priced
from fsdpplan.search.advice.words import degrees
from fsdpplan.units import format_percent, format_seconds

COSTS: dict[Kind, str] = {
    "setting": "nothing",
    "recipe": "a look at the loss",
}
"""What a change costs that buys nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Of a plan."""

    plan: str
    """The saved plan, as it is typed."""
    before: Priced
    wanted_fraction: float
    """More tokens a second."""
    tried: tuple[Tried, ...]
    searches: int

    @property
    def enough(self) -> list[Tried]:
        """Those that gain as much, the cheapest first."""
        return [one for one in self.tried if one.gain_fraction >= self.wanted_fraction]

    @property
    def others(self) -> list[Tried]:
        """Those that do not."""
        return [one for one in self.tried if one.gain_fraction < self.wanted_fraction]


def gains_screen(answer: Gains, *, width: int) -> str:
    """What `what-if --gain` prints."""
    case, step = answer.before.case, answer.before.estimate.step_seconds
    wanted = format_percent(answer.wanted_fraction)
    heading = (
        f"{case.model.name} on {case.cluster.gpus:,} x {case.cluster.device.name}, "
        f"{degrees(case.layout)}, {format_seconds(step.expected)} a step: what brings {wanted} "
        "more tokens a second, the cheapest first"
    )
    none = f"Nothing that was tried brings {wanted}."
    return blocks(
        wrapped(heading, width=width),
        _enough(answer, width) if answer.enough else none,
        listed("Less than that", map(_less, answer.others), width=width),
        wrapped(
            f"Each was planned again ({answer.searches} searches); to type after fsdpplan what-if "
            f"{answer.plan}. Costs: settings, then what changes the numbers or the batch, then "
            "hardware by how much more of it there is.",
            width=width,
        ),
    )


def _enough(answer: Gains, width: int) -> str:
    """A change a line, and what it costs below it."""
    lines = []
    for number, one in enumerate(answer.enough, start=1):
        assert one.found is not None
        words = one.change.words or "the best layout"
        sure = "" if one.found.told_apart else "; NOT told apart from the model's error"
        lines.append(
            wrapped(
                f"{words}: +{format_percent(one.gain_fraction)}",
                width=width,
                first=f"  {number}. ",
            )
        )
        lines.append(wrapped(f"costs {cost_words(one)}{sure}", width=width, first="     "))
    return "\n".join(lines)


def cost_words(one: Tried) -> str:
    """What a change costs."""
    kind = one.change.kind
    if kind != "hardware":
        return COSTS[kind]
    words = one.change.words
    what = "bandwidth between nodes" if "--inter-bw" in words else "number of GPUs"
    return f"{one.change.relative:.2f} times the {'GPU' if '--hardware' in words else what}"


def _less(one: Tried) -> str:
    words = one.change.words or "the best layout"
    if one.found is None:
        return f"{words}: {one.problem}"
    sign = "+" if one.gain_fraction >= 0 else "-"
    return f"{words}: {sign}{format_percent(abs(one.gain_fraction))}"


class ChangeJson(TypedDict):
    """A change that was planned again."""

    change: str
    """What to type after `fsdpplan what-if PLAN`; empty: the best layout of the same question."""
    kind: Kind
    relative: float
    """Of what hardware grows: so many times as much; 1: nothing is bought."""
    gain_fraction: float | None
    best: PricedJson | None
    """Null: nothing fits."""
    difference: DifferenceJson | None
    problem: str | None


class GainsJson(TypedDict):
    """What `what-if --gain --json` prints."""

    schema_version: int
    plan: PricedJson
    wanted_fraction: float
    """More tokens a second than the plan's."""
    enough: list[ChangeJson]
    """The cheapest first."""
    others: list[ChangeJson]
    searches: int


def gains_json(answer: Gains) -> str:
    """What `what-if --gain --json` prints."""
    document: GainsJson = {
        "schema_version": SCHEMA_VERSION,
        "plan": priced_document(answer.before),
        "wanted_fraction": answer.wanted_fraction,
        "enough": [_document(one) for one in answer.enough],
        "others": [_document(one) for one in answer.others],
        "searches": answer.searches,
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _document(one: Tried) -> ChangeJson:
    found = None if one.found is None else difference_document(one.found)
    return {
        "change": one.change.words,
        "kind": one.change.kind,
        "relative": one.change.relative,
        "gain_fraction": None if one.found is None else one.gain_fraction,
        "best": None if one.best is None else priced_document(one.best),
        "difference": found,
        "problem": one.problem or None,
    }
