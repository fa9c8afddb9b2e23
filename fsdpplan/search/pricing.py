"""Pricing: as few estimates as find the same layouts that pricing everything would.

A layout is only priced while its lower bound does not rule it out: against the fastest of its own
way to spread the ranks for a place in the list, and against the fastest of all, with the reach of
an error, for the first place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heapreplace
from math import inf

from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION
from fsdpplan.cost.least import least_communication_seconds, least_pipeline_seconds
from fsdpplan.cost.step import estimate, least_seconds
from fsdpplan.search.fitting import Question, needed_bytes
from fsdpplan.search.order import Entry, by_time, seconds
from fsdpplan.search.variants import WRAP_BLOCKS, buckets
from fsdpplan.spec.layout import Layout

REACH = 1 + MOST_INDISTINGUISHABLE_FRACTION
"""A layout that takes more than this times the fastest is never preferred to it."""


@dataclass(frozen=True, slots=True, order=True)
class Promise:
    """A layout and the least that it can take, whatever its buckets."""

    floor: float
    """Lower bound of the step, in seconds."""
    is_sharp: bool
    """The costlier bounds are in: they take a tenth of an estimate."""
    layout: Layout = field(compare=False)


def promise(asked: Question, layout: Layout) -> Promise:
    """The bound by compute."""
    least = least_seconds(
        model=asked.model,
        cluster=asked.cluster,
        training=asked.training,
        layout=_widest(asked, layout),
    )
    return Promise(least, False, layout)


def _sharpened(asked: Question, promise: Promise) -> Promise:
    """The bound by compute, by communication and by the way through a pipeline."""
    inputs = {
        "model": asked.model,
        "cluster": asked.cluster,
        "training": asked.training,
        "layout": _widest(asked, promise.layout),
    }
    least = max(least_communication_seconds(**inputs), least_pipeline_seconds(**inputs))  # type: ignore[arg-type]
    return Promise(max(promise.floor, least), True, promise.layout)


def _widest(asked: Question, layout: Layout) -> Layout:
    """The layout with the fewest FSDP units, whose collectives and launches cost least."""
    if layout.sharding != "fsdp" or asked.pins.wrap_blocks is not None:
        return layout
    return replace(layout, wrap_blocks=WRAP_BLOCKS[-1])


@dataclass(slots=True)
class Group:
    """The layouts of one way to spread the ranks; private to one search."""

    promises: list[Promise]
    """Not priced yet: a heap, the most promising first."""
    entries: list[Entry] = field(default_factory=list)
    """Priced."""

    def __post_init__(self) -> None:
        heapify(self.promises)

    @property
    def floor(self) -> float:
        """The least seconds of what is not priced yet."""
        return self.promises[0].floor if self.promises else inf

    @property
    def best(self) -> float:
        """The fastest that is priced."""
        return min(map(seconds, self.entries), default=inf)


def priced(asked: Question, promises: list[list[Promise]], limit: int) -> list[Entry]:
    """All layouts that the first place may go to, and of each group that may be listed the fastest
    with the usual buckets.

    The first place goes to a layout within reach of the fastest; the best data-parallel layout is
    always listed.
    """
    groups = [Group(promises=group) for group in promises if group]
    listed = _listed(asked, sorted(groups, key=lambda group: group.floor), limit)
    best = min((group.best for group in listed), default=inf)
    for group in listed:
        _price(asked, group, bound=REACH * best)
    fastest = [min(group.entries, key=by_time) for group in listed]
    best = _price_buckets(asked, listed, best=best)
    return [
        entry
        for group, fastest_of_group in zip(listed, fastest, strict=True)
        for entry in group.entries
        if seconds(entry) <= REACH * best or entry is fastest_of_group
    ]


def _listed(asked: Question, groups: list[Group], limit: int) -> list[Group]:
    """The groups that may be listed, each with its fastest layout priced.

    Beyond the reach of the `limit`-th fastest group nothing can be listed, but for the best of the
    kinds that always are.
    """
    listed: list[Group] = []
    fastest: list[float] = []
    wanted: dict[str, float] = {}
    for group in groups:
        kinds = _wanted_kinds(asked, group)
        bounds = [wanted.get(kind, inf) for kind in kinds]
        bounds.append(fastest[limit - 1] if len(fastest) >= limit else inf)
        _price(asked, group, bound=REACH * max(bounds), only_faster=True)
        if not group.entries:
            continue
        listed.append(group)
        fastest = sorted([*fastest, group.best])
        wanted |= {kind: min(group.best, wanted.get(kind, inf)) for kind in kinds}
    return listed


def _wanted_kinds(asked: Question, group: Group) -> set[str]:
    """Kinds of layouts of which the best one is always listed."""
    layouts = [one.layout for one in group.promises]
    return {"data-parallel"} if is_data_parallel(layouts[0]) else set()


def is_data_parallel(layout: Layout) -> bool:
    """Whether every rank computes whole layers of its own sequences."""
    return layout.tp == layout.pp == layout.cp == 1


def _price(asked: Question, group: Group, *, bound: float, only_faster: bool = False) -> None:
    """Price what may be within `bound`; `only_faster`: and than what is priced of the group."""
    best = group.best
    while group.floor <= (min(best, bound) if only_faster else bound):
        if not group.promises[0].is_sharp:
            heapreplace(group.promises, _sharpened(asked, group.promises[0]))
            continue
        group.entries.append(_entry(asked, heappop(group.promises).layout))
        best = min(best, seconds(group.entries[-1]))


def _entry(asked: Question, layout: Layout) -> Entry:
    return layout, estimate(
        model=asked.model, cluster=asked.cluster, training=asked.training, layout=layout
    )


def _price_buckets(asked: Question, groups: list[Group], *, best: float) -> float:
    """Try other buckets on what may still come first with them. The fastest time after that.

    Not in a pipeline: it gathers and reduces once a step, whatever the bucket.
    """
    promises = [
        (promise(asked, layout).floor, layout, group)
        for group in groups
        for layout, result in group.entries
        if layout.pp == 1 and any(row.exposed_seconds for row in result.communication)
    ]
    for floor, layout, group in sorted(promises, key=lambda found: found[0]):
        if floor > REACH * best:
            break
        if _sharpened(asked, Promise(floor, False, layout)).floor > REACH * best:
            continue
        for other in buckets(asked, layout):
            if needed_bytes(asked, other) <= asked.available_bytes:
                group.entries.append(_entry(asked, other))
                best = min(best, seconds(group.entries[-1]))
    return best
