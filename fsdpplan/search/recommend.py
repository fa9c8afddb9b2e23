"""Recommend: price every legal layout that fits, and rank them.

Legality comes before memory, memory before time, and each is skipped where a cheaper bound has
already decided. The bounds are exact, so neither they nor the order of the search ever change the
answer: whoever prices everything finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from fsdpplan.cost.band import difference_fraction
from fsdpplan.search.enumerate import Degrees, degrees
from fsdpplan.search.fitting import Question, Tally, fitting, hopeless
from fsdpplan.search.order import Difference, Entry, Tied, in_order
from fsdpplan.search.pins import Pins
from fsdpplan.search.pricing import Promise, is_data_parallel, priced, promise
from fsdpplan.search.reasons import reason_against, reason_for, reason_not_apart
from fsdpplan.search.remedy import nearest_miss
from fsdpplan.search.result import NearestMiss, SearchResult
from fsdpplan.search.variants import overlapped
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import RankedLayout
from fsdpplan.spec.training import Training


def recommend(
    *, model: Model, cluster: Cluster, training: Training, pins: Pins, limit: int = 10
) -> SearchResult:
    """The `limit` best ways to spread the ranks, each with its best policies.

    Layouts that differ only in policies (micro-batch, resharding, synchronisation, schedule,
    checkpointing, buckets) are one entry. The best data-parallel layout is always among the ranked.
    """
    asked = Question(model=model, cluster=cluster, training=training, pins=pins)
    tally, groups = _fitting(asked)
    if not tally.feasible:
        tally, groups = _fitting(replace(asked, nothing_fits_whole=True))
    entries = priced(asked, groups, limit)
    ranked, tied = _ranked(asked, entries, limit)
    return SearchResult(
        ranked=ranked,
        tied=tied,
        fastest_seconds=min((result.step_seconds.expected for _, result in entries), default=None),
        candidates=tally.candidates,
        feasible=tally.feasible,
        rejected=tuple(tally.rejected.most_common()),
        nearest_miss=None if ranked else _miss(asked, tally),
        example=_example(tally),
    )


def _fitting(asked: Question) -> tuple[Tally, list[list[Promise]]]:
    """What fits, for each way to spread the ranks, and what was seen on the way."""
    tally = Tally()
    every = degrees(
        model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
    )
    return tally, [_promises(asked, d, tally) for d in every]


def _promises(asked: Question, d: Degrees, tally: Tally) -> list[Promise]:
    """What fits with these degrees, with the least that it can take."""
    reason = hopeless(asked, d)
    if reason:
        tally.reject(reason)
        return []
    return [
        promise(asked, one)
        for layout in fitting(asked, d, tally)
        for one in (layout, *overlapped(asked, layout))
    ]


def _ranked(
    asked: Question, entries: list[Entry], limit: int
) -> tuple[tuple[RankedLayout, ...], tuple[int, ...]]:
    """The list, and the ranks in it that are not told apart from the first."""
    difference: Difference = partial(difference_fraction, cluster=asked.cluster)
    device_bytes = asked.cluster.device.memory_bytes
    ties = in_order(entries, difference=difference, device_bytes=device_bytes)
    ordered = _one_a_spread([entry for tied in ties for entry in tied.entries])
    if not ordered:
        return (), ()
    kept = ordered[:limit]
    if not any(is_data_parallel(layout) for layout, _ in kept):
        kept += [entry for entry in ordered[limit:] if is_data_parallel(entry[0])][:1]
    tied = [rank for rank, entry in enumerate(kept, start=1) if entry in ties[0].entries]
    reasons = _reasons(kept, ties[0], difference=difference, device_bytes=device_bytes)
    lines = [
        RankedLayout(rank=rank, layout=layout, estimate=result, reason=reason)
        for rank, ((layout, result), reason) in enumerate(zip(kept, reasons, strict=True), start=1)
    ]
    return tuple(lines), tuple(tied[1:])


def _reasons(
    kept: list[Entry], best: Tied, *, difference: Difference, device_bytes: int
) -> Iterator[str]:
    """Why the first of the list is first, and the others are not."""
    first, *others = kept
    yield reason_for(best, difference=difference, device_bytes=device_bytes)
    for entry in others:
        if entry in best.entries:
            yield reason_not_apart(entry, best, difference=difference, device_bytes=device_bytes)
        else:
            yield reason_against(entry, first)


def _one_a_spread(entries: list[Entry]) -> list[Entry]:
    """The first of each way to spread the ranks."""
    first: dict[tuple[object, ...], Entry] = {}
    for entry in entries:
        layout = entry[0]
        spread = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.ep)
        first.setdefault(spread, entry)
    return list(first.values())


def _example(tally: Tally) -> str | None:
    """What to say of a layout that was rejected for the commonest reason."""
    sentences = (tally.examples.get(reason) for reason, _ in tally.rejected.most_common())
    return next((sentence for sentence in sentences if sentence), None)


def _miss(asked: Question, tally: Tally) -> NearestMiss | None:
    if tally.closest is None:
        return None
    _, layout = tally.closest
    return nearest_miss(
        model=asked.model,
        cluster=asked.cluster,
        training=asked.training,
        layout=layout,
        pins=asked.pins,
    )
