"""Nearest: what to change of a layout that does not fit."""

from __future__ import annotations

from fsdpplan.search.advice.ladder import Rung, leaner_layouts
from fsdpplan.search.pins import Pins, changed_pins
from fsdpplan.search.question import Question
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Estimate, Plan


def nearest_that_fits(asked: Question, layout: Layout, priced: Estimate) -> Rung | None:
    """What to change of a layout that does not fit, and what comes of it: of leaner layouts of the
    same ranks, the fastest of those with the fewest changes; else what the search puts first."""
    plan = Plan(
        model=asked.model,
        cluster=asked.cluster,
        training=asked.training,
        layout=layout,
        estimate=priced,
        alternatives=(),
        sources=(),
        assumptions=(),
        warnings=(),
        versions=(),
    )
    rungs = leaner_layouts(plan, needed_bytes=None)
    if rungs:
        return min(rungs, key=lambda rung: rung.words.count("--"))
    found = recommend(
        model=asked.model,
        cluster=asked.cluster,
        training=asked.training,
        pins=Pins(),
        limit=1,
        learner=asked.learner,
    )
    if not found.ranked:
        return None
    first = found.ranked[0]
    words = changed_pins(layout, first.layout)
    return Rung(layout=first.layout, estimate=first.estimate, words=words)
