"""Scaling: what more devices bring, where that ends to pay, and the fewest that do at all.

Strong scaling keeps the global batch; weak scaling keeps the batch of a device, so that the global
one grows. The efficiency of a point is its tokens per second and device over those of the smallest
point that fits.

The knee is the last point up to which each doubling of the devices brings at least 1.6 times the
tokens per second: 80 % of what it could. Past it a doubling makes the same training over a quarter
dearer in GPU hours (1 / 0.8). Of points that are no doubling apart it is the gain a doubling would
have at the same slope,

    keeps = (rate_b / rate_a) ^ (1 / log2(gpus_b / gpus_a)) / 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2

from fsdpplan.search.advice.difference import Difference, Priced, difference
from fsdpplan.search.advice.remedies import first_fit
from fsdpplan.search.enumerate import divisors
from fsdpplan.search.question import Question

KNEE_FRACTION = 0.8
"""Of what a doubling could bring at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What so many devices do."""

    gpus: int
    tokens_per_second: float


def efficiency(smallest: Rate, one: Rate) -> float:
    """Rate of a device over that of one of the smallest point."""
    own = one.tokens_per_second / one.gpus
    return own / (smallest.tokens_per_second / smallest.gpus)


def kept_of_doubling(one: Rate, other: Rate) -> float:
    """Share of a doubling's gain that is left between two points: 1 is ideal, a half nothing."""
    doublings = log2(other.gpus / one.gpus)
    gain: float = (other.tokens_per_second / one.tokens_per_second) ** (1 / doublings)
    return gain / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """Where more devices end to pay."""

    gpus: int
    next_gpus: int | None = None
    """The point after it; None: it is the last one, and the knee lies beyond."""
    kept_fraction: float | None = None
    """What the step to that point leaves of a doubling."""


def knee(rates: Sequence[Rate]) -> Knee | None:
    """Of points by growing number of devices, all of which fit; None where there are none."""
    if not rates:
        return None
    for one, other in pairwise(rates):
        kept = kept_of_doubling(one, other)
        if kept < KNEE_FRACTION:
            return Knee(gpus=one.gpus, next_gpus=other.gpus, kept_fraction=kept)
    return Knee(gpus=rates[-1].gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The answer for a number of GPUs."""

    gpus: int
    global_batch: int | None
    priced: Priced | None = None
    """The best layout; None where nothing fits."""
    problem: str = ""
    """Why nothing does."""

    @property
    def rate(self) -> Rate | None:
        """What they do."""
        if self.priced is None:
            return None
        return Rate(gpus=self.gpus, tokens_per_second=self.priced.estimate.tokens_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one machine, by growing number of GPUs."""

    hardware: str
    scaling: str
    points: tuple[Point, ...]
    price_per_gpu_hour: float | None = None
    """In any currency; None: not said."""

    @property
    def rates(self) -> list[Rate]:
        """Of the points that fit."""
        return [one.rate for one in self.points if one.rate is not None]

    @property
    def knee(self) -> Knee | None:
        """Where more GPUs end to pay; None where nothing fits."""
        return knee(self.rates)

    def is_knee(self, point: Point) -> bool:
        """Whether more GPUs end to pay here, which only a later point can show."""
        found = self.knee
        return found is not None and found.next_gpus is not None and found.gpus == point.gpus

    def efficiency_error(self, point: Point) -> float | None:
        """80 % half-width of that ratio: what both points share cancels."""
        first = next((one.priced for one in self.points if one.priced is not None), None)
        if first is None or point.priced is None:
            return None
        return 0.0 if first == point.priced else difference(first, point.priced).error_fraction

    def price(self, point: Point, tokens: int) -> float | None:
        """Of so many tokens."""
        if point.priced is None or self.price_per_gpu_hour is None:
            return None
        return point.priced.gpu_hours_for(tokens) * self.price_per_gpu_hour

    def efficiency(self, point: Point) -> float | None:
        """Of a point, against the smallest that fits."""
        return None if point.rate is None else efficiency(self.rates[0], point.rate)


def pairs(curves: Sequence[Curve]) -> Iterator[tuple[Curve, Point, Difference | None]]:
    """Each point with its difference from the same number of GPUs of the first machine, of the same
    scaling; None of the first machine itself, and where one of the two does not fit."""
    for curve in curves:
        first = next(one for one in curves if one.scaling == curve.scaling)
        others = {point.gpus: point.priced for point in first.points}
        for point in curve.points:
            before = None if curve is first else others.get(point.gpus)
            is_pair = before is not None and point.priced is not None
            yield (
                curve,
                point,
                difference(before, point.priced) if is_pair else None,  # type: ignore[arg-type]
            )


def knee_words(curve: Curve) -> str:
    """Where the knee is, and what lies behind it."""
    found = curve.knee
    assert found is not None
    if found.next_gpus is None:
        return (
            f"Knee: none up to {found.gpus:,} GPUs: each doubling brings at least "
            f"{KNEE_FRACTION:.0%} of what it could."
        )
    assert found.kept_fraction is not None
    return (
        f"Knee: {found.gpus:,} GPUs, the last to which each doubling brings at least "
        f"{KNEE_FRACTION:.0%} of what it could. Towards {found.next_gpus:,} it brings "
        f"{found.kept_fraction:.0%}: a token costs {1 / found.kept_fraction - 1:.0%} more GPU "
        "hours for each doubling."
    )


def node_counts(node_gpus: int, *, most: int) -> Iterator[int]:
    """Numbers of devices that use nodes well, growing: divisors of a node, then whole nodes."""
    yield from (count for count in divisors(node_gpus) if count <= most)
    yield from range(2 * node_gpus, most + 1, node_gpus)


def doublings(least: int, most: int, node_gpus: int) -> tuple[int, ...]:
    """The default points from `least` to `most`: powers of two times whole nodes, and of a single
    node its halves."""
    inside = [count for count in divisors(node_gpus) if node_gpus // count in _POWERS]
    beyond = [node_gpus * power for power in _POWERS[1:]]
    return tuple(count for count in (*inside, *beyond) if least <= count <= most)


_POWERS = tuple(2**n for n in range(21))


def fits_at_all(question: Question) -> bool:
    """Whether some layout is legal and fits.

    What all layouts with some degrees need at least is looked at first (`bounds.room`), so that
    machines that are far too small cost next to nothing.
    """
    return first_fit(replace(question, learner=None)) is not None
