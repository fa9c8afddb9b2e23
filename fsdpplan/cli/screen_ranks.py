"""The ranked list: why the first is first, and what the others lose to it."""

from __future__ import annotations

from fsdpplan.cli.render import wrapped
from fsdpplan.search.result import SearchResult
from fsdpplan.search.words import degrees, differences
from fsdpplan.spec.plan import RankedLayout
from fsdpplan.units import format_gib, format_percent, format_seconds

LEAST_GAIN_FRACTION = 0.01
"""A layout that cannot run yet is worth a place of its own from this gain on."""


def faster_ones(result: SearchResult, chosen: RankedLayout) -> list[RankedLayout]:
    """The fastest layout that today's trainer cannot run, where it runs another and this gains."""
    if not chosen.estimate.runnable:
        return []
    most = chosen.estimate.step_seconds.expected * (1 - LEAST_GAIN_FRACTION)
    gaining = [
        ranked
        for ranked in result.ranked
        if not ranked.estimate.runnable and ranked.estimate.step_seconds.expected < most
    ]
    return sorted(gaining, key=lambda ranked: ranked.estimate.step_seconds.expected)[:1]


def why(result: SearchResult, chosen: RankedLayout) -> str:
    """Why this one is shown, and which others the model cannot tell from the first."""
    if result.best_runnable is None:
        shown = f"Rank 1: {chosen.reason}. Today's trainer runs none of these layouts"
    elif chosen.rank == 1:
        shown = f"Rank 1: {chosen.reason}"
    else:
        shown = (
            f"Rank {chosen.rank}, the first that today's trainer can run; against rank 1: "
            f"{chosen.reason}"
        )
    if not result.tied:
        return f"{shown}."
    ranks = " and ".join(map(str, result.tied[-2:]))
    ranks = ", ".join((*map(str, result.tied[:-2]), ranks))
    noun = "ranks" if len(result.tied) > 1 else "rank"
    return (
        f"{shown}. Not told apart from rank 1 by step time: {noun} {ranks}; first comes what "
        "leaves more head-room, then the simpler."
    )


def ranked_lines(heading: str, others: list[RankedLayout], chosen: RankedLayout, width: int) -> str:
    items = [_other(ranked, chosen, width) for ranked in others]
    return "\n".join([wrapped(heading, width=width), *items]) if items else ""


def _other(ranked: RankedLayout, chosen: RankedLayout, width: int) -> str:
    step = ranked.estimate.step_seconds.expected
    gain = 1 - step / chosen.estimate.step_seconds.expected
    faster = f" ({format_percent(gain)} less)" if gain >= LEAST_GAIN_FRACTION else ""
    memory = format_gib(ranked.estimate.memory.peak_device_bytes)
    words = "; ".join((degrees(ranked.layout), *differences(ranked.layout, chosen.layout)))
    return "\n".join(
        (
            wrapped(
                f"{format_seconds(step)}{faster}, {memory}: {words}",
                width=width,
                first=f"  {ranked.rank:>2}  ",
            ),
            wrapped(ranked.reason, width=width, first="      "),
        )
    )
