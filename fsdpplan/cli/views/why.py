"""Why not this one: the best layout that has it, the terms that lost it, and where it would win."""

from __future__ import annotations

import json
from typing import Any, Literal, TypedDict

from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.cli.views.answer import chance_beyond
from fsdpplan.cli.views.difference import (
    DifferenceJson,
    PricedJson,
    difference_document,
    priced_document,
    side_by_side,
    told_terms,
)
from fsdpplan.cli.views.render import blocks, listed, wrapped
from fsdpplan.cost.band import tie_fraction
from fsdpplan.cost.schedule.stages import named_stages
from fsdpplan.files.plans import (
    SCHEMA_VERSION,
    ClusterJson,
    LayoutJson,
    ModelJson,
    TrainingJson,
    cluster_document,
    layout_document,
    model_document,
    training_document,
)
from fsdpplan.search.advice.difference import Priced, difference
from fsdpplan.search.advice.why import Knob, Side, Threshold, Turned, Why
from fsdpplan.search.advice.words import degrees, policy
from fsdpplan.search.order import decided_by, preference
from fsdpplan.units import format_gib, format_seconds

DECIDES = {
    "kinds": "fewer kinds of parallelism",
    "weight": "kinds of parallelism that ask for less",
    "form": "a simpler form of the state",
    "settings": "fewer unusual settings",
    "is_tight": "more of the memory free",
    "is_wide": "gathers inside a domain of the network",
    "seconds": "the shorter step",
    "peak_bytes": "the lower peak",
    "text": "what sorts first",
}
"""What the first of two that tie has, by the part of the preference that decides."""


def why_screen(answer: Why, inputs: Inputs, *, width: int) -> str:
    """What `explain --why` prints."""
    what = f"{inputs.model.name} on {inputs.cluster.gpus:,} x {inputs.cluster.device.name}"
    no = "" if answer.has_it else " not"
    first = answer.first.case.layout
    return blocks(
        wrapped(f"Why{no} {answer.wanted.words}: {what}", width=width),
        "\n".join(
            (
                wrapped(f"Recommended: {degrees(first)}", width=width),
                wrapped(policy(first), width=width, first="  "),
                wrapped(
                    f"{format_seconds(answer.first.estimate.step_seconds.expected)} a step",
                    width=width,
                    first="  ",
                ),
            )
        ),
        wrapped(verdict_words(answer), width=width),
        _beside(answer, width),
        listed(_heading(answer), map(threshold_words, _told(answer)), width=width),
    )


Verdict = Literal["first", "tie", "slower", "does not fit", "not legal"]


def kind(answer: Why) -> Verdict:
    """How it stands."""
    having = answer.with_it
    if answer.has_it:
        return "first"
    if having.best is None:
        return "not legal" if having.problem else "does not fit"
    return "slower" if difference(answer.first, having.best).told_apart else "tie"


def verdict_words(answer: Why) -> str:
    """How it stands, in a sentence or three."""
    words, having = answer.wanted.words, answer.with_it
    match kind(answer):
        case "first":
            return f"What is recommended has it ({words})."
        case "not legal":
            return f"With {words} nothing can be trained: {having.problem}."
        case "does not fit":
            assert having.needed_bytes is not None
            assert having.available_bytes is not None
            assert having.nearest is not None
            short = format_gib(having.needed_bytes - having.available_bytes)
            chance = chance_beyond(having.needed_bytes, answer.first.case.cluster)
            return (
                f"With {words} nothing fits: the nearest ({degrees(having.nearest)}) needs "
                f"{format_gib(having.needed_bytes)} of the {format_gib(having.available_bytes)} "
                f"of a GPU that are planned with, {short} too much{chance}."
            )
    assert having.best is not None
    told = told_terms(answer.first, having.best)
    behind = format_seconds(abs(_behind(answer)))
    more = "more" if _behind(answer) > 0 else "less"
    sentence = f"The best with {words} takes {behind} {more} a step: it {told}."
    if kind(answer) == "slower":
        return sentence
    return f"{sentence} {_tie_words(answer, having.best)}"


def _behind(answer: Why) -> float:
    assert answer.with_it.best is not None
    one, other = answer.first, answer.with_it.best
    return other.estimate.step_seconds.expected - one.estimate.step_seconds.expected


def _tie_words(answer: Why, best: Priced) -> str:
    """That it is a tie, and what decides it."""
    found = difference(answer.first, best)
    behind = found.ratio - 1
    said = "That is a tie: less than the error of the model."
    if behind > tie_fraction(found.error_fraction):
        return f"{said} So far apart the shorter expected step comes first."
    cluster = answer.first.case.cluster
    first, other = (
        preference((one.case.layout, one.estimate), cluster) for one in (answer.first, best)
    )
    return f"{said} What is recommended has {DECIDES[decided_by(first, other)]}."


def _beside(answer: Why, width: int) -> str:
    best = answer.with_it.best
    if best is None or answer.has_it:
        return ""
    return side_by_side(f"The best with {answer.wanted.words}", answer.first, best, width)


def _heading(answer: Why) -> str:
    if answer.has_it:
        return "Where it would no longer be recommended, each input by itself"
    return "Where it would be recommended, each input by itself"


def _told(answer: Why) -> list[tuple[Why, Turned]]:
    """Those with a threshold first."""
    ordered = sorted(answer.turned, key=lambda one: not one.thresholds)
    return [(answer, one) for one in ordered]


def threshold_words(told: tuple[Why, Turned]) -> str:
    """`bandwidth of infiniband between nodes, each GPU: from 380 GB/s up (now 50.0 GB/s; at 373
    GB/s not yet)`."""
    answer, one = told
    knob = one.knob
    now = f"now {knob.words(knob.now)}"
    if not one.thresholds:
        least, most = (knob.words(value) for value in knob.range)
        return f"{knob.name}: nowhere from {least} to {most} ({now})"
    parts = [_side_words(answer, knob, found) for found in one.thresholds]
    return f"{knob.name}: {'; '.join(parts)} ({now})"


def _side_words(answer: Why, knob: Knob, found: Threshold) -> str:
    way = "up" if found.is_above else "down"
    words = f"at {knob.words(found.far.value)}"
    if found.lasts:
        words = f"from {knob.words(found.far.value)} {way}"
    elif found.lasts is not None:
        words = f"from {knob.words(found.far.value)} {way}, though not to the end of the range"
    if found.near.value != knob.now:
        not_yet = "not yet" if not answer.has_it else "it still is"
        words += f", at {knob.words(found.near.value)} {not_yet}"
    if answer.has_it:
        first = found.far.first
        words += f" ({'nothing fits' if first is None else degrees(first.case.layout)})"
    return words


class SideOfThresholdJson(TypedDict):
    """The answer at one value of an input."""

    value: float
    has_it: bool
    layout: LayoutJson | None
    """The first then; null: nothing fits."""


class ThresholdJson(TypedDict):
    """Where the answer changes."""

    way: Literal["up", "down"]
    lasts: bool | None
    """Whether the answer at the end of the range is that of the far side; null: not asked."""
    near: SideOfThresholdJson
    """The side of the present value."""
    far: SideOfThresholdJson


class TurnedJson(TypedDict):
    """What turning one input by itself does."""

    input: str
    unit: str | None
    now: float
    least: float
    most: float
    """Ends of the range that was looked at."""
    thresholds: list[ThresholdJson]
    """Empty: the answer stays as it is."""
    searches: int


class WhyJson(TypedDict):
    """What `explain --why --json` prints."""

    schema_version: int
    model: ModelJson
    cluster: ClusterJson
    training: TrainingJson
    why: str
    """What was asked for."""
    pins: dict[str, Any]
    """Field of a layout -> the value that was asked for."""
    more_than_one_rank: list[str]
    """Axes that were asked for without a number."""
    verdict: Verdict
    words: str
    recommended: PricedJson
    with_it: PricedJson | None
    """The best layout that has it; null: there is none."""
    difference: DifferenceJson | None
    problem: str | None
    """Why there is none."""
    needed_bytes: int | None
    available_bytes: int | None
    inputs: list[TurnedJson]
    assumptions: list[str]
    warnings: list[str]


def why_json(answer: Why, inputs: Inputs) -> str:
    """What `explain --why --json` prints."""
    having = answer.with_it
    best = having.best
    document: WhyJson = {
        "schema_version": SCHEMA_VERSION,
        "model": model_document(inputs.model),
        "cluster": cluster_document(inputs.cluster),
        "training": training_document(inputs.training),
        "why": answer.wanted.words,
        "pins": answer.wanted.pins.given(),
        "more_than_one_rank": list(answer.wanted.split),
        "verdict": kind(answer),
        "words": verdict_words(answer),
        "recommended": priced_document(answer.first),
        "with_it": None if best is None else priced_document(best),
        "difference": None if best is None else difference_document(difference(answer.first, best)),
        "problem": having.problem or None,
        "needed_bytes": having.needed_bytes,
        "available_bytes": having.available_bytes,
        "inputs": [_turned(one) for one in answer.turned],
        "assumptions": list(inputs.assumptions),
        "warnings": list(inputs.warnings),
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _turned(one: Turned) -> TurnedJson:
    knob = one.knob
    least, most = knob.range
    return {
        "input": knob.name,
        "unit": knob.unit or None,
        "now": knob.now,
        "least": least,
        "most": most,
        "thresholds": [
            {
                "way": "up" if found.is_above else "down",
                "lasts": found.lasts,
                "near": _side(found.near),
                "far": _side(found.far),
            }
            for found in one.thresholds
        ],
        "searches": one.searches,
    }


def _side(side: Side) -> SideOfThresholdJson:
    first = side.first
    layout = None
    if first is not None:
        layout = layout_document(named_stages(model=first.case.model, layout=first.case.layout))
    return {"value": side.value, "has_it": side.has_it, "layout": layout}
