"""Searching numbers: the least of a function of a few positive numbers, the same on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import sqrt
from statistics import fmean

Numbers = Mapping[str, float]
Fitted = Mapping[str, Numbers]
"""Numbers by `profile` (devices, physics) or `profile:level`."""

FIRST_STEP = 2.0
LAST_STEP = 1.004
"""Factors between which the step shrinks; finer than the digits that are kept."""

DIGITS = 3
"""Significant digits of a fitted number: a fourth would move no prediction by 0.5 %."""

CAP = 0.3
"""Most that the error of one row counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where one number is looked for."""

    lowest: float
    highest: float
    starts: tuple[float, ...]
    """Values from which the search begins."""


def least(
    function: Callable[[Mapping[str, float]], float], ranges: Mapping[str, Range]
) -> dict[str, float]:
    """Numbers, rounded to `DIGITS`, at which `function` is least.

    One number after the other is multiplied and divided by a step, which shrinks to its root where
    neither helps; from each combination of starts. Fixed order and no chance: the same rows give
    the same digits.
    """
    names = list(ranges)
    best: tuple[float, dict[str, float]] | None = None
    for start in product(*(ranges[name].starts for name in names)):
        found = _descend(function, dict(zip(names, start, strict=True)), ranges)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    return {name: float(f"{value:.{DIGITS}g}") for name, value in best[1].items()}


def _descend(
    function: Callable[[Mapping[str, float]], float],
    point: dict[str, float],
    ranges: Mapping[str, Range],
) -> tuple[float, dict[str, float]]:
    value = function(point)
    steps = dict.fromkeys(point, FIRST_STEP)
    while max(steps.values()) > LAST_STEP:
        for name in point:
            for factor in (steps[name], 1 / steps[name]):
                limits = ranges[name]
                moved = min(limits.highest, max(limits.lowest, point[name] * factor))
                if moved == point[name]:
                    continue
                tried = {**point, name: moved}
                reached = function(tried)
                if reached < value * (1 - 1e-9):
                    value, point = reached, tried
                    break
            else:
                steps[name] = sqrt(steps[name])
    return value, point


def capped(errors: Iterable[float]) -> float:
    """Mean size of `errors`, each at most `CAP`."""
    return fmean(min(abs(error), CAP) for error in errors)
