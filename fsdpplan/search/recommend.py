"""Recommend: price every legal layout that fits, and rank them.

Legality comes before memory, memory before time, and each is skipped where a cheaper bound has
already decided. The bounds are exact: whoever prices every layout with the usual settings finds the
same. Rare settings are then tried one at a time on what is near the fastest (`refine`).

Weak nodes of a plan: what a step takes without them, and what each choice costs.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from fsdpplan.cost.band import difference_fraction
from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.memory.peak import available_bytes, rank_memory
from fsdpplan.search.advice.reasons import Reasons
from fsdpplan.search.bounds.fitting import Tally
from fsdpplan.search.bounds.pricing import faster, priced, usual
from fsdpplan.search.order import Difference, Entry, in_order, listed, seconds
from fsdpplan.search.pins import Pins, pin_flag
from fsdpplan.search.question import (
    Learner,
    Listed,
    NearestMiss,
    NearMiss,
    NextRun,
    Question,
    SearchResult,
    next_run,
)
from fsdpplan.search.space import Space
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.nodes import compress_host_list
from fsdpplan.spec.plan import Estimate, Plan, RankedLayout
from fsdpplan.spec.training import Training
from fsdpplan.spec.weak import weak_nodes, without_nodes
from fsdpplan.units import format_percent, format_seconds

MOST_ROUNDS = 4
"""Of a search with a learner; the first nearly always is the last."""
SLACK = 0.99
"""Of the least factor: with it the first round is nearly always enough."""

NEAR_MISS_ODDS = 2.0
"""Times the chance not to fit that is allowed, up to which a layout is a near miss: one that fits
with 90 % where 95 % are asked for."""
NEAR_MISS_GAIN = 0.05
"""Of the tokens a second, for which a layout that is less sure to fit is worth a word."""


@contextmanager
def _no_circles_sought() -> Iterator[None]:
    """A search makes frozen values by the hundred thousand, none of them in a circle: to look for
    circles takes a tenth of its time, and finds no memory to free (tests/benchmarks/search.py)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_circles_sought()
def recommend(
    *,
    model: Model,
    cluster: Cluster,
    training: Training,
    pins: Pins,
    limit: int = 10,
    learner: Learner | None = None,
) -> SearchResult:
    """The `limit` best ways to spread the ranks, each with its best policies.

    Layouts that differ only in policies (micro-batch, resharding, synchronisation, schedule,
    checkpointing, buckets) are one entry. The best layout of each kind of
    `order.COMPARED` is always among the ranked.
    With a `learner`, what measured runs say decides, by the same bounds.
    """
    asked = Question(model=model, cluster=cluster, training=training, pins=pins)
    difference = difference_of(cluster, learner)
    space = Space(asked)
    entries = priced(space, limit, difference)
    explored = space.priced
    if learner is not None and entries:
        explored = entries = _learned(space, limit, learner)
    found, tally = _list(asked, entries, limit, difference), space.tally
    return SearchResult(
        listed=found,
        candidates=tally.candidates,
        feasible=tally.feasible,
        priced=tally.priced,
        pruned=tally.pruned,
        rejected=tuple(tally.rejected.most_common()),
        nearest_miss=None if found.ranked else _miss(space),
        example=_example(tally, pins),
        explored=tuple(explored),
        space=space,
    )


def difference_of(cluster: Cluster, learner: Learner | None) -> Difference:
    """By what two layouts of a question are told apart."""
    if learner is not None:
        return learner.difference_fraction
    return lambda one, other: difference_fraction(one[1], other[1], cluster=cluster)


def _learned(space: Space, limit: int, learner: Learner) -> list[Entry]:
    """What was priced, and what else may be listed, as the runs say.

    Layouts with the usual settings are looked for again, with floors that are the cost model's
    times a little less than the least factor of the layouts that were met; rare settings are those
    that the cost model alone found worth a look.
    """
    found = {layout: learner.corrected(layout, plain) for layout, plain in space.priced}
    for _ in range(MOST_ROUNDS):
        least = SLACK * min(map(_factor, found.values()))
        asked = replace(space.asked, learner=learner, least_factor=least)
        found |= dict(usual(Space(asked), limit))
        if min(map(_factor, found.values())) >= least:
            break
    space.tally.priced = len(found)
    return list(found.items())


def _factor(estimate: Estimate) -> float:
    return 1.0 if estimate.learned is None else estimate.learned.factor


def _list(asked: Question, entries: list[Entry], limit: int, difference: Difference) -> Listed:
    """The list, and what is said of its rows."""
    order = in_order(entries, difference=difference, cluster=asked.cluster)
    if order is None:
        return Listed()
    rows = listed(order, limit=limit)
    ranks = {id(entry): rank for rank, entry in enumerate(rows, start=1)}
    reasons = Reasons(
        order=order,
        fastest_rank=ranks[id(order.fastest)],
        difference=difference,
        cluster=asked.cluster,
    )
    of_rows = [reasons.of(row) for row in rows]
    return Listed(
        ranked=tuple(
            RankedLayout(rank=rank, layout=row[0], estimate=row[1], reason=reason.words)
            for rank, (row, reason) in enumerate(zip(rows, of_rows, strict=True), start=1)
        ),
        notes=tuple(reason.note for reason in of_rows),
        tied=tuple(sorted(ranks[id(one)] for one in order.tied[1:] if id(one) in ranks)),
        fastest_rank=reasons.fastest_rank,
        errors=tuple(map(reasons.error, rows)),
        next_run=_next_run(rows, difference) if rows[0][1].learned else None,
    )


def _next_run(rows: list[Entry], difference: Difference) -> NextRun | None:
    """Which row is most worth running, beside the first."""
    first, *others = rows
    listed = [
        (rank, seconds(row), difference(first, row)) for rank, row in enumerate(others, start=2)
    ]
    return next_run(listed, seconds(first))


def _example(tally: Tally, pins: Pins) -> str | None:
    """What to say of a layout that was rejected for the commonest reason, of those that say what a
    pinned setting has to be if there is one: a remedy of another setting leaves the pin refused."""
    every = (tally.examples.get(reason) for reason, _ in tally.rejected.most_common())
    sentences = [sentence for sentence in every if sentence]
    flags = {pin_flag(name) for name in pins.given()}
    of_pins = (one for one in sentences if flags & set(re.findall(r"--[a-z-]+", one)))
    return next(of_pins, sentences[0] if sentences else None)


@_no_circles_sought()
def near_miss(asked: Question, found: SearchResult) -> NearMiss | None:
    """The fastest layout that misses the chance to fit that is asked for by little, where it is
    faster by more than `NEAR_MISS_GAIN` than all that was found; None where there is none.

    By little: not to fit is at most `NEAR_MISS_ODDS` times as likely as it may be.
    """
    if found.fastest_seconds is None:
        return None
    lower = 1 - NEAR_MISS_ODDS * (1 - asked.training.fits_fraction)
    looser = replace(asked.training, fits_fraction=max(lower, 0.0))
    most_bytes = available_bytes(cluster=asked.cluster, training=looser)
    if most_bytes <= asked.available_bytes:
        return None
    if asked.learner is not None:
        least = SLACK * min(_factor(told) for _, told in found.explored)
        asked = replace(asked, least_factor=least)
    most_seconds = found.fastest_seconds / (1 + NEAR_MISS_GAIN)
    entry = faster(found.space.of_bytes(most_bytes, asked), most_seconds)
    if entry is None:
        return None
    gain = found.fastest_seconds / seconds(entry) - 1
    return NearMiss(layout=entry[0], estimate=entry[1], faster_fraction=gain)


def _miss(space: Space) -> NearestMiss | None:
    asked, layout = space.asked, space.closest
    if layout is None:
        return None
    return NearestMiss(
        layout=layout,
        needed_bytes=rank_memory(asked.case(layout)).peak_device_bytes,
        available_bytes=asked.available_bytes,
    )


def without_excluded(plan: Plan, excluded: Collection[str]) -> Plan:
    """`plan` as it is predicted where its weak nodes among `excluded` are left out; scripts carry
    no list."""
    out = [node for node in weak_nodes(plan.cluster) if node in excluded]
    if not out:
        return plan
    cluster = without_nodes(plan.cluster, out)
    predicted = estimate(replace(plan.case, cluster=cluster))
    return replace(plan, cluster=cluster, estimate=predicted, alternatives=())


def price_of_weak_nodes(plan: Plan, excluded: Collection[str]) -> tuple[str, ...]:
    """Sentences on nodes that hold the others back: what it brings that some are left out, and
    what it costs that others are kept."""
    weak = weak_nodes(plan.cluster)
    out = tuple(node for node in weak if node in excluded)
    kept = tuple(node for node in weak if node not in excluded)
    without = without_nodes(plan.cluster, out)
    sentences = []
    if out:
        slow, fast = _step_seconds(plan, plan.cluster), _step_seconds(plan, without)
        sentences.append(
            f"without {_nodes(plan, out)} a step takes {format_seconds(fast)}; kept, "
            f"{'it' if len(out) == 1 else 'they'} would make it {_longer(slow, fast)}"
        )
    if kept:
        slow = _step_seconds(plan, without)
        fast = _step_seconds(plan, without_nodes(without, kept))
        sentences.append(
            f"keeping {_nodes(plan, kept)} makes a step {_longer(slow, fast)} in place of "
            f"{format_seconds(fast)}; --exclude {compress_host_list(kept)} takes other nodes"
        )
    return tuple(sentences)


def _nodes(plan: Plan, nodes: tuple[str, ...]) -> str:
    """The nodes, and what is weak about them."""
    texts = (spot.text for spot in plan.cluster.weak if set(spot.nodes) & {*nodes})
    return f"{compress_host_list(nodes)} ({'; '.join(dict.fromkeys(texts))})"


def _step_seconds(plan: Plan, cluster: Cluster) -> float:
    return estimate(replace(plan.case, cluster=cluster)).step_seconds.expected


def _longer(slow_seconds: float, fast_seconds: float) -> str:
    more = format_percent(slow_seconds / fast_seconds - 1)
    return f"{more} longer: {format_seconds(slow_seconds)}"
