"""Reasons: why a layout won or lost, generated from its terms and never invented."""

from __future__ import annotations

from fsdpplan.search.order import (
    Difference,
    Entry,
    Tied,
    headroom_steps,
    kinds,
    seconds,
    settings,
)
from fsdpplan.search.words import degrees, differences
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout
from fsdpplan.units import format_gib


def reason_for(tied: Tied, *, difference: Difference, device_bytes: int) -> str:
    """Why the first of the list is first."""
    first = tied.entries[0]
    if first is tied.leader:
        return "fastest of all that fit"
    share = seconds(first) / seconds(tied.leader) - 1
    error = difference(tied.leader[1], first[1])
    fastest, advantage = (
        _other(tied.leader[0], first[0]),
        _advantage(first, tied.leader, device_bytes),
    )
    return (
        f"{share:.1%} behind the fastest ({fastest}), which is within the error of their "
        f"difference ({error:.1%}), and {advantage}"
    )


def _other(layout: Layout, first: Layout) -> str:
    """What sets `layout` apart: its degrees, or its policies where those are the same."""
    if degrees(layout) != degrees(first):
        return degrees(layout)
    return ", ".join(differences(layout, first))


def _advantage(first: Entry, leader: Entry, device_bytes: int) -> str:
    """Why the first is preferred to the fastest."""
    if headroom_steps(first, leader, device_bytes=device_bytes) > 0:
        spared = leader[1].memory.peak_device_bytes - first[1].memory.peak_device_bytes
        return f"leaves {format_gib(spared)} more free"
    return "simpler" if kinds(first[0]) < kinds(leader[0]) else "has fewer settings to mind"


def reason_not_apart(entry: Entry, tied: Tied, *, difference: Difference, device_bytes: int) -> str:
    """What stands against an entry whose time is not told apart from that of the first."""
    first = tied.entries[0]
    share = seconds(entry) / seconds(first) - 1
    error = difference(first[1], entry[1])
    apart = f"{share:+.1%} a step, not told apart (error {error:.1%})"
    steps, best_steps = (
        headroom_steps(one, tied.leader, device_bytes=device_bytes) for one in (entry, first)
    )
    if steps < best_steps:
        more = entry[1].memory.peak_device_bytes - first[1].memory.peak_device_bytes
        return f"{apart}; {format_gib(more)} less head-room"
    if kinds(entry[0]) > kinds(first[0]):
        return f"{apart}; more kinds of parallelism"
    if settings(entry[0]) > settings(first[0]):
        return f"{apart}; more settings to mind"
    return f"{apart}; no simpler and hardly more head-room"


def reason_against(entry: Entry, first: Entry) -> str:
    """What the entry does worse than the first, by the largest difference of its terms."""
    layout, result = entry
    best = first[1]
    share = seconds(entry) / seconds(first) - 1
    terms = {
        "compute": result.time.compute_seconds - best.time.compute_seconds,
        "exposed communication": result.time.exposed_communication_seconds
        - best.time.exposed_communication_seconds,
        "pipeline bubble": result.time.bubble_seconds - best.time.bubble_seconds,
        "optimizer": result.time.optimizer_seconds - best.time.optimizer_seconds,
    }
    worst = max(terms, key=lambda term: terms[term])
    return f"{share:+.1%} a step: {_cause(worst, layout, result)}"


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
