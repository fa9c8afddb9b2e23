"""Objective: which of several answers is best, and which no other one beats in both of two things.

An answer is a layout on a number of GPUs, with what its training takes. On one number of GPUs of
one machine price and power are the same for all layouts, so that the fastest is also the cheapest
and draws least: the objectives part where the number of GPUs is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from fsdpplan.cost.band import peak_factor
from fsdpplan.cost.bill import Bill
from fsdpplan.search.question import ObjectiveName, Question, SearchResult
from fsdpplan.search.recommend import recommend

Need = Literal["tokens", "price", "power", "counts", "one count"]
"""What must be known for an objective: the tokens in all, the price of a GPU hour, the power of a
node; or several numbers of GPUs, or a single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One answer."""

    gpus: int
    tokens_per_second: float
    free_bytes: float
    """Memory of the fullest GPU that is left, as it is expected."""
    kept_fraction: float = 1.0
    """Of its time that failures leave (`cost.goodput`); 1: they were not asked about."""
    bill: Bill | None = None
    """None: the tokens in all are not said."""


Axis = Callable[[Offer], float]
"""What is to be small."""


def _of_bill(read: Callable[[Bill], float]) -> Axis:
    def axis(offer: Offer) -> float:
        assert offer.bill is not None  # its objective needs it
        return read(offer.bill)

    return axis


def token_seconds(offer: Offer) -> float:
    """Time of a token, which is that of the training at one batch."""
    return 1 / offer.tokens_per_second


def token_gpu_seconds(offer: Offer) -> float:
    """GPU time of a token."""
    return offer.gpus / offer.tokens_per_second


def kept_token_seconds(offer: Offer) -> float:
    """Time of a token that is kept: what failures took is in it."""
    return 1 / (offer.tokens_per_second * offer.kept_fraction)


def kept_token_gpu_seconds(offer: Offer) -> float:
    """GPU time of a token that is kept."""
    return offer.gpus * kept_token_seconds(offer)


def least_headroom(offer: Offer) -> float:
    """The more is free, the less."""
    return -offer.free_bytes


cost = _of_bill(lambda bill: bill.cost.expected if bill.cost else 0.0)
energy = _of_bill(lambda bill: bill.energy_kwh.expected if bill.energy_kwh else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is made least."""

    words: str
    """The best one, in words."""
    axis: Axis
    beside: Axis
    """What matters beside it, with which the frontier is drawn."""
    frontier: str
    """The two, in words."""
    needs: tuple[Need, ...] = ()


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "throughput": Objective(
        words="most tokens a second",
        axis=token_seconds,
        beside=token_gpu_seconds,
        frontier="time and GPU hours",
    ),
    "goodput": Objective(
        words="most tokens a second that are kept",
        axis=kept_token_seconds,
        beside=kept_token_gpu_seconds,
        frontier="time and GPU hours, failures included",
    ),
    "cost": Objective(
        words="least money",
        axis=cost,
        beside=token_seconds,
        frontier="time and money",
        needs=("tokens", "price"),
    ),
    "energy": Objective(
        words="least energy",
        axis=energy,
        beside=token_seconds,
        frontier="time and energy",
        needs=("tokens", "power"),
    ),
    "fewest-gpus": Objective(
        words="fewest GPUs",
        axis=lambda offer: float(offer.gpus),
        beside=token_seconds,
        frontier="time and GPUs",
        needs=("counts",),
    ),
    "headroom": Objective(
        words="most memory free",
        axis=least_headroom,
        beside=token_seconds,
        frontier="time and memory",
        needs=("one count",),
    ),
}
"""Each objective by its name: one that is added here is searched, shown and drawn."""


def meets(offer: Offer, chance: float) -> bool:
    """Whether it ends in time with that chance; true where there is no deadline."""
    own = None if offer.bill is None else offer.bill.deadline_chance
    return own is None or own >= chance


def best(offers: Sequence[Offer], objective: Objective, *, chance: float) -> int | None:
    """Index of the best of those that end in time; None where none does. Of equals the faster."""
    able = [index for index, offer in enumerate(offers) if meets(offer, chance)]
    return min(
        able,
        key=lambda index: (
            objective.axis(offers[index]),
            token_seconds(offers[index]),
            offers[index].gpus,
        ),
        default=None,
    )


def frontier(offers: Sequence[Offer], one: Axis, other: Axis) -> tuple[int, ...]:
    """Indices of those that no other one beats: by growing `one`. Of equals the first."""
    order = sorted(range(len(offers)), key=lambda index: (one(offers[index]), other(offers[index])))
    kept: list[int] = []
    for index in order:
        if not kept or other(offers[index]) < other(offers[kept[-1]]):
            kept.append(index)
    return tuple(kept)


ROOM_STEP = 0.1
"""Of the device's memory: in such steps layouts with more of it free are looked for."""


def leaner(
    asked: Question, first: SearchResult, *, step: float = ROOM_STEP
) -> Iterator[SearchResult]:
    """What a search finds with less and less memory to fill than `first` takes, each time another
    one with a lower peak, down to the least that any layout with the usual settings needs.

    The next is the best with one more `step` of the device's memory free. Where nothing fits in
    that, it is the best with as much as the nearest miss needs; and at last, with less than that,
    nothing.
    """
    peak = first.ranked[0].estimate.memory.peak_device_bytes
    while (found := _next_leaner(asked, peak, step)) is not None:
        yield found
        peak = found.ranked[0].estimate.memory.peak_device_bytes


def _next_leaner(asked: Question, peak: int, step: float) -> SearchResult | None:
    memory = asked.cluster.device.memory_bytes / peak_factor(asked.cluster.device)
    steps = ceil(round(peak / memory / step, 9)) - 1
    for limit in dict.fromkeys((min(peak - 1, int(steps * step * memory)), peak - 1)):
        found = _within(asked, limit)
        miss = found.nearest_miss
        if miss is not None and miss.needed_bytes < peak:
            found = _within(asked, miss.needed_bytes)
        if found.ranked:
            return _for_its_memory(found)
    return None


def _within(asked: Question, most_bytes: int) -> SearchResult:
    """The best of those whose predicted peak is no higher."""
    device = asked.cluster.device
    used = (max(0, most_bytes) + 0.5) * peak_factor(device) / device.memory_bytes
    return recommend(
        model=asked.model,
        cluster=asked.cluster,
        training=replace(asked.training, headroom_fraction=1 - used),
        pins=asked.pins,
        learner=asked.learner,
    )


def _for_its_memory(found: SearchResult) -> SearchResult:
    """The same, where the first says what it was looked for."""
    first, *others = found.ranked
    first = replace(first, reason="the fastest of all that leave so much memory free")
    return replace(found, listed=replace(found.listed, ranked=(first, *others)))
