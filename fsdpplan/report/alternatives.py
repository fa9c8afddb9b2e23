"""Alternatives: the next layouts of the plan's list, a line each with why it is not first."""

from __future__ import annotations

from fsdpplan.cost.band import expected_peak_bytes
from fsdpplan.report.values import Cell, Section, Table, cell, sentence
from fsdpplan.search.advice.words import compact
from fsdpplan.spec.plan import Plan, RankedLayout

MOST_ROWS = 8
"""Of the table; the page of all layouts that were priced has the others."""


def alternatives_section(plan: Plan) -> tuple[Section, ...]:
    """The chosen layout and the next ones; nothing where the plan has no list."""
    if len(plan.alternatives) < 2:
        return ()
    own = next((one.reason for one in plan.alternatives if one.layout == plan.layout), "")
    return (
        Section(
            name="alternatives",
            title="Alternatives",
            says=sentence(f"chosen: {own}") if own else "",
            blocks=(
                Table(
                    caption="The best ways to spread the ranks",
                    columns=("layout", "rank", "step", "memory", "why it is not first"),
                    rows=tuple(_row(one, plan) for one in plan.alternatives[:MOST_ROWS]),
                ),
            ),
        ),
    )


def _row(one: RankedLayout, plan: Plan) -> tuple[Cell | str, ...]:
    device = plan.cluster.device
    return (
        compact(one.layout),
        cell(one.rank, "whole"),
        cell(one.estimate.step_seconds.expected, "seconds"),
        cell(expected_peak_bytes(one.estimate.memory, device), "bytes"),
        "this one" if one.layout == plan.layout else one.reason,
    )
