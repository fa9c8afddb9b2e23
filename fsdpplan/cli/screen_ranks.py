"""The ranked list: why the first is first, and what the others lose to it."""

from __future__ import annotations

from fsdpplan.cli.render import wrapped
from fsdpplan.search.result import SearchResult
from fsdpplan.search.words import degrees, differences
from fsdpplan.spec.plan import RankedLayout
from fsdpplan.units import format_gib, format_percent, format_seconds

LEAST_GAIN_FRACTION = 0.01
"""From this on a runner-up is said to be faster."""


def why(result: SearchResult) -> str:
    """Why the first is first, and which others the model cannot tell from it."""
    shown = f"Rank 1: {result.ranked[0].reason}"
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
