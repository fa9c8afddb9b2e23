"""What failures leave of a run's time: on the screen and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from math import inf
from typing import Annotated, Any, TypedDict

from fsdpplan.cli.resolve.failures import Outlook
from fsdpplan.cli.views.render import blocks, facts, listed
from fsdpplan.cost.goodput import Goodput, Reliability
from fsdpplan.files.plans import EACH_MAY_BE_NULL
from fsdpplan.spec.plan import Estimate
from fsdpplan.spec.training import Training
from fsdpplan.units import format_bandwidth, format_gb, format_percent, format_seconds


def outlook_screen(found: Outlook, training: Training, estimate: Estimate, *, width: int) -> str:
    """The goodput, what it follows from, and where the rest of the time goes."""
    good, known = found.goodput, found.reliability.value
    band = good.fraction
    pairs = [
        (
            "goodput",
            f"{format_percent(band.expected)} (80 % band {format_percent(band.lower)} to "
            f"{format_percent(band.upper)})",
        ),
        ("lost", _lost(good)),
        ("fails", _fails(found)),
        ("saves", _saves(found)),
        (
            "checkpoint",
            f"{format_gb(good.checkpoint_bytes)} at "
            f"{format_bandwidth(known.write_bytes_per_second)}: training waits for "
            f"{format_seconds(good.blocking_seconds)}"
            + (
                f", it is written in the {format_seconds(good.writing_seconds)} behind"
                if known.in_background
                else ", until it is written"
            ),
        ),
        (
            "restart",
            f"{format_seconds(good.restart_seconds)}, of which its checkpoint is read in "
            f"{format_seconds(good.restart_seconds - known.restart_seconds)}",
        ),
        *_to_train(found, training, estimate),
        *_spares(found),
    ]
    said = (f"{name}: {words}" for name, words in found.reliability.sources)
    return blocks(
        f"What failures leave\n{facts(pairs, width=width)}",
        listed("How often machines fail and what a save takes, from", said, width=width),
    )


def every_words(found: Outlook) -> str:
    """`each 323 steps (6.2 min of training)`."""
    good = found.goodput
    each = "each step" if good.every_steps == 1 else f"each {good.every_steps:,} steps"
    return f"{each} ({format_seconds(good.interval_seconds)} of training)"


def fails_words(found: Outlook) -> str:
    """`one failure in 3.09 h`."""
    if found.goodput.mtbf_seconds == inf:
        return "no failure"
    return f"one failure in {format_seconds(found.goodput.mtbf_seconds)}"


def _lost(good: Goodput) -> str:
    parts = {
        "to start again": good.shares.restarting,
        "to steps done again": good.shares.redone,
        "to saving": good.shares.saving,
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{100 * share:.2f} % {name}" for name, share in ordered)


def _fails(found: Outlook) -> str:
    known = found.reliability.value
    gpus, nodes = _count(found.gpus, "GPU"), _count(found.nodes, "node")
    return (
        f"{fails_words(found)}: {gpus} with one in {_each(known.gpu_mtbf_seconds)} each, {nodes} "
        f"in {_each(known.node_mtbf_seconds)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _each(seconds: float) -> str:
    return f"{seconds / 3600:,.0f} h"


def _saves(found: Outlook) -> str:
    if found.is_given:
        return f"{every_words(found)}, as was asked"
    return f"{every_words(found)}, which keeps most"


def _to_train(found: Outlook, training: Training, estimate: Estimate) -> list[tuple[str, str]]:
    steps, band = training.steps, found.goodput.fraction
    if steps is None:
        return []
    seconds = steps * estimate.step_seconds.expected
    if not band.expected:
        return [("to train", "never, with so many failures")]
    whole = format_seconds(seconds / band.expected)
    without = format_seconds(seconds, beside=seconds / band.expected)
    return [("to train", f"{whole} with failures, {without} without")]


def _spares(found: Outlook) -> list[tuple[str, str]]:
    good = found.goodput
    if good.spares is None:
        return []
    if not good.spares:
        return [("spare nodes", "none is worth its price: too few failures wait for a node")]
    return [
        (
            "spare nodes",
            f"{good.spares} in the allocation of a day (emit-launch --spares {good.spares}) keep "
            f"{format_percent(good.spares_gain_fraction)} more for each of its nodes",
        )
    ]


class OutlookJson(TypedDict):
    """Beside the fields of a goodput; null is what is infinite."""

    mtbf_seconds: float | None
    every_steps_given: bool
    """Somebody said how often to save."""
    reliability: Annotated[dict[str, Any], Reliability, EACH_MAY_BE_NULL]
    sources: dict[str, str]
    """Where the numbers of the reliability come from."""


GoodputJson = Annotated[dict[str, Any], Goodput, OutlookJson]


def outlook_document(found: Outlook) -> dict[str, Any]:
    """Under `goodput` in JSON; what is infinite is null."""
    document = asdict(found.goodput)
    known = asdict(found.reliability.value)
    for holder in (document, known):
        for name, value in holder.items():
            if value == inf:
                holder[name] = None
    said: OutlookJson = {
        "mtbf_seconds": document["mtbf_seconds"],
        "every_steps_given": found.is_given,
        "reliability": known,
        "sources": dict(found.reliability.sources),
    }
    return {**document, **said}
