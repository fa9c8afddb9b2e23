"""Recommend: price every legal layout that fits, and rank them.

Legality comes before memory, memory before time, and each is skipped where a cheaper bound has
already decided. The bounds are exact: whoever prices every layout with the usual settings finds the
same. Rare settings are then tried one at a time on what is near the fastest (`refine`).
"""

from __future__ import annotations

from functools import partial

from fsdpplan.cost.band import difference_fraction
from fsdpplan.search.fitting import Tally
from fsdpplan.search.order import Difference, Entry, in_order, listed
from fsdpplan.search.pins import Pins
from fsdpplan.search.pricing import is_data_parallel, priced
from fsdpplan.search.question import Question
from fsdpplan.search.reasons import Reasons
from fsdpplan.search.remedy import nearest_miss
from fsdpplan.search.result import Listed, NearestMiss, SearchResult
from fsdpplan.search.space import Space
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
    space = Space(Question(model=model, cluster=cluster, training=training, pins=pins))
    difference: Difference = partial(difference_fraction, cluster=cluster)
    entries = priced(space, limit, difference)
    found, tally = _list(space.asked, entries, limit, difference), space.tally
    return SearchResult(
        listed=found,
        candidates=tally.candidates,
        feasible=tally.feasible,
        priced=tally.priced,
        pruned=tally.pruned,
        rejected=tuple(tally.rejected.most_common()),
        nearest_miss=None if found.ranked else _miss(space.asked, tally),
        example=_example(tally),
    )


def _list(asked: Question, entries: list[Entry], limit: int, difference: Difference) -> Listed:
    """The list, and what is said of its rows."""
    order = in_order(entries, difference=difference, cluster=asked.cluster)
    if order is None:
        return Listed()
    rows = listed(order, limit=limit, is_wanted=is_data_parallel)
    ranks = {id(entry): rank for rank, entry in enumerate(rows, start=1)}
    reasons = Reasons(
        order=order,
        fastest_rank=ranks[id(order.fastest)],
        difference=difference,
        cluster=asked.cluster,
    )
    return Listed(
        ranked=tuple(
            RankedLayout(rank=rank, layout=row[0], estimate=row[1], reason=reasons.of(row).words)
            for rank, row in enumerate(rows, start=1)
        ),
        tied=tuple(sorted(ranks[id(one)] for one in order.tied[1:] if id(one) in ranks)),
        fastest_rank=reasons.fastest_rank,
        errors=tuple(map(reasons.error, rows)),
    )


def _example(tally: Tally) -> str | None:
    """What to say of a layout that was rejected for the commonest reason."""
    sentences = (tally.examples.get(reason) for reason, _ in tally.rejected.most_common())
    return next((sentence for sentence in sentences if sentence), None)


def _miss(asked: Question, tally: Tally) -> NearestMiss | None:
    layout = tally.closest(asked)
    if layout is None:
        return None
    return nearest_miss(
        model=asked.model,
        cluster=asked.cluster,
        training=asked.training,
        layout=layout,
        pins=asked.pins,
    )
