"""The ranked list: why the first is first, and why the others are not."""

from __future__ import annotations

from fsdpplan.cli.views.answer import fits_words
from fsdpplan.cli.views.render import wrapped
from fsdpplan.search.order import LEAST_HEADROOM_FRACTION
from fsdpplan.search.result import SearchResult
from fsdpplan.search.words import degrees, differences
from fsdpplan.spec.plan import RankedLayout
from fsdpplan.units import format_gib, format_seconds

MOST_RUNNERS_UP = 4
"""Besides these the fastest is shown, wherever it stands, and what is most worth running."""


def why(result: SearchResult) -> str:
    """Why the first is first, and which others the model cannot tell from the fastest."""
    shown = f"Rank 1: {result.ranked[0].reason}."
    tied = result.listed.tied
    if not tied:
        return shown
    ranks = f"1 to {tied[-1]}" if len(tied) > 1 else "1 and 2"
    return (
        f"{shown} Ranks {ranks} are not told apart from the fastest by step time: first comes "
        "what has the fewest kinds of parallelism, then the fewest unusual settings, then "
        f"{LEAST_HEADROOM_FRACTION:.0%} of the memory free, then the shortest step."
    )


def worth_running(result: SearchResult) -> str:
    """Which other layout a run would tell most of; empty where none is worth it."""
    found = result.listed.next_run
    if found is None:
        return ""
    layout = result.ranked[found.rank - 1].layout
    return (
        f"Most worth running beside it: rank {found.rank} ({degrees(layout)}), faster with a "
        f"chance of {found.chance:.0%}; a look at it is expected to spare "
        f"{found.expected_gain_fraction:.1%} of every step."
    )


def runners_up(result: SearchResult) -> list[RankedLayout]:
    """The next best, the fastest, and what is most worth running."""
    others = result.ranked[1:]
    next_rank = None if result.listed.next_run is None else result.listed.next_run.rank
    return [
        ranked
        for index, ranked in enumerate(others)
        if index < MOST_RUNNERS_UP or ranked is result.fastest or ranked.rank == next_rank
    ]


def ranked_lines(heading: str, result: SearchResult, width: int) -> str:
    """The runners-up, each with what sets it apart from the first and why it is not first."""
    chosen = result.ranked[0]
    items = [_other(ranked, chosen, width) for ranked in runners_up(result)]
    return "\n".join([wrapped(heading, width=width), *items]) if items else ""


def _other(ranked: RankedLayout, chosen: RankedLayout, width: int) -> str:
    step = ranked.estimate.step_seconds.expected
    peak = ranked.estimate.memory
    memory = format_gib(round(peak.peak_device_bytes * peak.expected_over_predicted))
    if chance := fits_words(peak):
        memory += f", {chance}"
    words = "; ".join((degrees(ranked.layout), *differences(ranked.layout, chosen.layout)))
    return "\n".join(
        (
            wrapped(
                f"{format_seconds(step)}, {memory}: {words}",
                width=width,
                first=f"  {ranked.rank:>2}  ",
            ),
            wrapped(ranked.reason, width=width, first="      "),
        )
    )
