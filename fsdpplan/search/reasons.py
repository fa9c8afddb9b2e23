"""Reasons: why a layout won or lost, generated from its terms and never invented."""

from __future__ import annotations

from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout

Entry = tuple[Layout, Estimate]


def reason_for(kept: list[Entry]) -> str:
    """Why the first of the list is first."""
    result = kept[0][1]
    fastest = min(entry[1].step_seconds.expected for entry in kept)
    if result.step_seconds.expected > fastest:
        share = result.step_seconds.expected / fastest - 1
        return f"{share:.1%} behind the fastest, which is within the error, and simpler"
    return "fastest of all that fit"


def reason_against(entry: Entry, first: Entry) -> str:
    """What the entry does worse than the first, by the largest difference of its terms."""
    layout, result = entry
    best = first[1]
    difference = result.step_seconds.expected - best.step_seconds.expected
    share = difference / best.step_seconds.expected
    if difference <= 0:
        return f"{share:+.1%} a step, within the error, for more kinds of parallelism"
    terms = {
        "compute": result.time.compute_seconds - best.time.compute_seconds,
        "exposed communication": result.time.exposed_communication_seconds
        - best.time.exposed_communication_seconds,
        "pipeline bubble": result.time.bubble_seconds - best.time.bubble_seconds,
        "optimizer": result.time.optimizer_seconds - best.time.optimizer_seconds,
    }
    worst = max(terms, key=lambda term: terms[term])
    cause = _cause(worst, layout, result)
    return f"{share:+.1%} a step: {cause}"


def _cause(term: str, layout: Layout, result: Estimate) -> str:
    match term:
        case "exposed communication":
            row = max(result.communication, key=lambda r: r.exposed_seconds)
            return f"{row.collective} over {row.axis} of {row.ranks} ({row.level}) is exposed"
        case "compute":
            if layout.activation_checkpointing != "none":
                return f"compute: recomputes ({layout.activation_checkpointing})"
            return "compute: smaller or more matmuls"
        case "pipeline bubble":
            return f"pipeline bubble of {layout.pp} stages"
        case _:
            return "optimizer over more parameters a rank"
