"""Pairs of rare settings, around the fastest layout of each situation: does any gain together?

    python -m tests.search.pairs [SITUATION ...]

The search changes one rare setting at a time (`refine`), and without a pipeline goes on only from
what gained. Here every change of every change of its answer is tried, where its state lives and how
many sequences go through at once among them, with what has to be recomputed for it. One line a
situation; exits 1 where a pair is faster than the search's fastest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from fsdpplan.search.enumerate import divisors
from fsdpplan.search.order import seconds
from fsdpplan.search.question import Question
from fsdpplan.search.recommend import recommend
from fsdpplan.search.refine import Refining
from fsdpplan.search.space import Space, entry_of
from fsdpplan.search.variants import buckets, changed
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.values import replace
from tests.search.test_situations import SITUATIONS, asked_in


def fastest(asked: Question) -> tuple[Layout, float]:
    """The fastest that the search finds, with its seconds."""
    found = recommend(
        model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
    )
    row = found.ranked[found.listed.fastest_rank - 1]
    return row.layout, seconds((row.layout, row.estimate))


def moved(asked: Question, layout: Layout) -> Iterator[Layout]:
    """`layout` with its state in the other memory, and with other micro-batches."""
    if layout.sharding == "fsdp":
        yield replace(layout, offload="none" if layout.offload == "cpu" else "cpu")
    each = asked.training.global_batch // layout.data_parallel
    for micro_batch in divisors(each):
        yield replace(layout, micro_batch=micro_batch, num_microbatches=each // micro_batch)


def pairs(space: Space, layout: Layout) -> Iterator[Layout]:
    """Legal layouts of one change of one change of `layout`."""
    asked = space.asked

    def allowed(one: Layout) -> bool:
        return asked.pins.allows(one) and space.is_legal(one)

    def changes(one: Layout) -> list[Layout]:
        return [*changed(asked, one), *moved(asked, one)]

    for first in filter(allowed, [layout, *changes(layout)]):
        yield from filter(allowed, [*changes(first), *buckets(asked, first)])


def main(names: list[str]) -> int:
    """Try the pairs of every situation whose answer has no pipeline."""
    gained = tried = 0
    for situation in SITUATIONS:
        if names and situation["name"] not in names:
            continue
        asked = asked_in(situation).asked
        layout, least = fastest(asked)
        if layout.pp > 1:
            print(f"{situation['name']}: a pipeline, where changes are combined", flush=True)
            continue
        refining, number, best = Refining(Space(asked), best=least), 0, least
        for pair in pairs(refining.space, layout):
            number += 1
            refining.limit = best * (1 - 1e-9)
            for one in refining.fitting(pair):
                best = min(best, seconds(entry_of(asked, one)))
        tried, gained = tried + number, gained + (best < least)
        print(f"{situation['name']}: {number} pairs, {best / least - 1:+.2%}", flush=True)
    print(f"{tried} pairs, in {gained} situations one gains")
    return 1 if gained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
