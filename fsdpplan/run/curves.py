"""Curves: what a run reports step by step, in so many points that a chart can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from fsdpplan.run.follow.metric_events import Step

MOST_POINTS = 1000
"""Of one curve: more than a chart is wide."""

Quantity = Literal["loss", "step_seconds", "mfu_fraction", "tokens_per_second", "reserved_bytes"]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One step."""

    step: int
    value: float


def curve(
    steps: Sequence[Step], quantity: Quantity, *, most: int = MOST_POINTS
) -> list[CurvePoint]:
    """What each step reports of `quantity`, in at most so many points; empty where none does. What
    is no number, as the loss of a run that diverged, is no point."""
    known = [
        CurvePoint(one.step, value)
        for one in steps
        if (value := getattr(one, quantity)) is not None and isfinite(value)
    ]
    return thinned(known, most=most)


def thinned(points: Sequence[CurvePoint], *, most: int) -> list[CurvePoint]:
    """At most `most` of them, 4 or more: the first and the last, and of each stretch of those
    between its lowest and its highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 2
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        begin, end = (len(inner) * one // stretches for one in (stretch, stretch + 1))
        own = range(begin + 1, end + 1)
        kept |= {min(own, key=lambda i: points[i].value), max(own, key=lambda i: points[i].value)}
    return [points[index] for index in sorted(kept)]
