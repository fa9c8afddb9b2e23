"""Learned: what a search asks of whoever has learned from measured runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, exp, log, pi, sqrt
from typing import Protocol

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout

LEAST_GAIN_FRACTION = 0.002
"""A run that is expected to spare less of every step is not worth its time."""


class Learner(Protocol):
    """A posterior over step times."""

    def corrected(self, layout: Layout, estimate: Estimate) -> Estimate:
        """The cost model's estimate as the runs say."""

    def difference_fraction(
        self, one: tuple[Layout, Estimate], other: tuple[Layout, Estimate]
    ) -> float:
        """80 % half-width of the ratio of two step times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    """The listed layout that is most worth running beside the first."""

    rank: int
    chance: float
    """That it is faster than the first, 0..1."""
    expected_gain_fraction: float
    """What is spared of every step, on average over what its run may show: nothing where it turns
    out to be slower, since the first is kept then."""


def expected_gain(*, behind_log: float, deviation: float) -> float:
    """Mean of max(0, d) of a normal d with mean -`behind_log`: what a look at it may bring.

    Source: expected improvement, Jones, Schonlau and Welch 1998, *Efficient Global Optimization*,
    equation 15.
    """
    if deviation <= 0:
        return max(0.0, -behind_log)
    z = -behind_log / deviation
    density = exp(-(z**2) / 2) / sqrt(2 * pi)
    return deviation * (density + z * _below(z))


def next_run(listed: list[tuple[int, float, float]], first_seconds: float) -> NextRun | None:
    """The best of (rank, expected seconds, error of its difference from the first, an 80 %
    half-width); None where none may spare enough."""
    found = []
    for rank, seconds, error in listed:
        behind, deviation = log(seconds / first_seconds), log(1 + error) / NORMAL_80
        found.append(
            NextRun(
                rank=rank,
                chance=_below(-behind / deviation) if deviation > 0 else float(behind < 0),
                expected_gain_fraction=expected_gain(behind_log=behind, deviation=deviation),
            )
        )
    best = max(found, key=lambda one: one.expected_gain_fraction, default=None)
    return best if best and best.expected_gain_fraction >= LEAST_GAIN_FRACTION else None


def _below(z: float) -> float:
    """Share of a normal distribution below `z` standard deviations."""
    return (1 + erf(z / sqrt(2))) / 2
