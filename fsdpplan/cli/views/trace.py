"""Traces: what was written, and where a measured step differs from the predicted one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpplan.cli.views.render import blocks, facts, table, wrapped
from fsdpplan.cost.timeline.events import Timeline
from fsdpplan.run.trace.explain import Explanation
from fsdpplan.run.trace.overlay import Difference, Overlay
from fsdpplan.search.advice.sensitivity import field_words, value_words
from fsdpplan.spec.plan import Case
from fsdpplan.units import format_gb, format_percent, format_seconds

MOST_DIFFERENCES = 12
"""Kinds that a screen shows."""

MOST_LEFT = 0.5
"""Share of all differences that an input may leave and still be called an explanation."""

LEAST_FRACTION = 0.001
"""Of the longer step: smaller differences are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A trace that was written."""

    out: Path
    size_bytes: int
    events: int
    timeline: Timeline
    case: Case
    shown_microbatches: int
    share: float
    """Of the run's steps, that are as this one."""
    expected_seconds: float
    """What the plan expects of a step."""


def written_screen(one: Written, *, width: int) -> str:
    """What is in it, and what is not."""
    layout, step = one.case.layout, one.timeline.step_seconds
    ranks = "one rank" if layout.pp == 1 else f"one rank of each of {layout.pp} pipeline stages"
    terms = one.timeline.term_seconds()
    rows = [
        ("trace", f"{one.out}: {one.events:,} events, {format_gb(one.size_bytes)}"),
        ("step", f"{format_seconds(step)} of {ranks}"),
        *((word, format_seconds(seconds, beside=step)) for word, seconds in terms.items()),
    ]
    return blocks(
        facts(rows, width=width),
        wrapped(" ".join(_left_out(one)), width=width),
        wrapped("Open it in ui.perfetto.dev, beside a profile of torch's.", width=width),
    )


def _left_out(one: Written) -> list[str]:
    """What the trace does not show as finely as the rest."""
    number, said = one.case.layout.num_microbatches, []
    if one.shown_microbatches + 1 < number:
        said.append(
            f"Of {number} micro-batches the first {one.shown_microbatches} and the last are shown "
            "kernel by kernel, the others pass by pass (--micro-batches)."
        )
    step = one.timeline.step_seconds
    if one.share == 1 and abs(one.expected_seconds / step - 1) > LEAST_FRACTION:
        said.append(
            f"The plan expects {format_seconds(one.expected_seconds, beside=step)}, by measured "
            "runs or as another version predicted it; the events are what the cost model says "
            "today."
        )
    if one.share < 1:
        said.append(
            f"The precision changes in this run: the step is that of "
            f"{one.case.training.precision}, {format_percent(one.share)} of all."
        )
    return said


def written_json(one: Written) -> str:
    """The same for programs."""
    document = {
        "out": str(one.out),
        "bytes": one.size_bytes,
        "events": one.events,
        "step_seconds": one.timeline.step_seconds,
        "pipeline_rank": one.timeline.rank,
        "terms_seconds": one.timeline.term_seconds(),
        "micro_batches": one.case.layout.num_microbatches,
        "micro_batches_by_kernel": one.shown_microbatches,
    }
    return json.dumps(document, indent=2, allow_nan=False)


def overlay_screen(found: Overlay, out: Path | None, *, width: int) -> str:
    """Differences as a table, and the inputs that explain them."""
    predicted, measured = found.predicted, found.measured
    stage = f", pipeline stage {found.stage}" if found.stages > 1 else ""
    ratio = measured.seconds / predicted.seconds - 1
    head = [
        ("measured", f"{format_seconds(measured.seconds)}: {measured.chosen}"),
        ("predicted", f"{format_seconds(predicted.seconds)}, rank {found.rank}{stage}"),
        ("difference", f"{ratio:+.1%} of the predicted step"),
    ]
    longer = max(predicted.seconds, measured.seconds)
    large = [one for one in found.differences if abs(one.seconds) >= LEAST_FRACTION * longer]
    rows = [_row(one, longer) for one in large[:MOST_DIFFERENCES]]
    listed = (
        table(
            rows,
            headers=("where they differ", "predicted", "measured", "difference", "calls"),
            align=("left", "right", "right", "right", "left"),
            width=width,
        )
        if rows
        else f"  No kind differs by more than {format_percent(LEAST_FRACTION)} of the step."
    )
    return blocks(
        facts(head, width=width),
        listed,
        "\n".join(wrapped(one, width=width) for one in _slowest(large)),
        "\n".join(wrapped(one, width=width) for one in _explained(found)),
        wrapped(f"Both are in {out}: open it in ui.perfetto.dev", width=width) if out else "",
    )


def _row(one: Difference, beside: float) -> list[str]:
    calls = ""
    if one.predicted_calls != one.measured_calls and " over " in one.name:
        calls = f"{one.predicted_calls} predicted, {one.measured_calls} measured"
    sign = "+" if one.seconds > 0 else "-"
    return [
        one.name,
        format_seconds(one.predicted_seconds, beside=beside),
        format_seconds(one.measured_seconds, beside=beside),
        f"{sign}{format_seconds(abs(one.seconds), beside=beside)}",
        calls,
    ]


def _slowest(large: list[Difference]) -> list[str]:
    return [f"Of {one.name} one call is far behind: {one.slowest}." for one in large if one.slowest]


def _explained(found: Overlay) -> list[str]:
    """The inputs, each by itself."""
    good = [one for one in found.explanations if one.left_fraction <= MOST_LEFT]
    if not good:
        largest = max((abs(one.seconds) for one in found.differences), default=0.0)
        if largest <= LEAST_FRACTION * found.predicted.seconds:
            return []
        best = ""
        if found.explanations:
            best = f" The best of them would be {_explanation(found.explanations[0])}."
        return [f"No single input of the cost model explains most of what differs.{best}"]
    first, *others = good
    said = [f"Explained best by {_explanation(first)}."]
    if first.also:
        words = ", ".join(field_words(field) for field in first.also)
        said.append(f"As well, in the same measure, by: {words}.")
    said += [f"Else by {_explanation(one)}." for one in others[:2]]
    return said


def _explanation(one: Explanation) -> str:
    would = value_words(one.field, one.explaining_value)
    has = value_words(one.field, one.value)
    left = format_percent(one.left_fraction)
    return f"{field_words(one.field)}: {would}, not {has}; {left} of all differences is left"


def overlay_json(found: Overlay, out: Path | None) -> str:
    """The same for programs, nothing left out."""
    document: dict[str, Any] = {
        "rank": found.rank,
        "stage": found.stage,
        "step": found.measured.chosen,
        "predicted_step_seconds": found.predicted.seconds,
        "measured_step_seconds": found.measured.seconds,
        "differences": [
            {
                "what": one.name,
                "predicted_seconds": one.predicted_seconds,
                "measured_seconds": one.measured_seconds,
                "difference_seconds": one.seconds,
                "predicted_calls": one.predicted_calls,
                "measured_calls": one.measured_calls,
                "predicted_exposed_seconds": one.predicted_exposed_seconds,
                "measured_exposed_seconds": one.measured_exposed_seconds,
                "slowest_call": one.slowest,
            }
            for one in found.differences
        ],
        "explanations": [
            {
                "input": one.field,
                "value": one.value,
                "explaining_value": one.explaining_value,
                "left_fraction": one.left_fraction,
                "also": list(one.also),
            }
            for one in found.explanations
        ],
        "out": None if out is None else str(out),
    }
    return json.dumps(document, indent=2, allow_nan=False)
