"""What `--plot` draws below an answer: where time and memory go, and what else was looked at.

All numbers are those of the answer's JSON, or sums of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fsdpplan.cli.views.charts import Axis, Band, Bar, Mark, bands, bars, changes, marks
from fsdpplan.cli.views.render import blocks, wrapped
from fsdpplan.cli.views.side_by_side import LETTERS, gpus_axis
from fsdpplan.cost.band import expected_peak_bytes, peak_factor
from fsdpplan.run.curves import Quantity, curve
from fsdpplan.search.advice.difference import Priced, difference, step_terms
from fsdpplan.search.advice.sensitivity import field_words
from fsdpplan.search.question import SearchResult
from fsdpplan.search.scaling import Curve
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.plan import CollectiveCost, Estimate
from fsdpplan.units import GIB, format_count, format_gib, format_seconds

if TYPE_CHECKING:
    from fsdpplan.cli.resolve.goal import Answer
    from fsdpplan.cli.views.comparison import Entry
    from fsdpplan.cli.views.difference import WhatIf
    from fsdpplan.cli.views.sensitivity import Followed
    from fsdpplan.run.compare import Comparison
    from fsdpplan.run.follow.metrics import Measured

RANKS = "123456789abcdefghijklmnopqrstuvwxyz"
MOST_BARS = 14
MOST_STEPS = 200
"""Of a curve in a terminal."""


def headed(heading: str, chart: str, width: int) -> str:
    """A chart below its heading; nothing where there is no chart."""
    return f"{wrapped(heading, width=width)}\n{chart}" if chart else ""


def estimate_plots(estimate: Estimate, device: Device, *, width: int) -> str:
    """Of one layout: its step, its memory, its collectives."""
    return blocks(
        step_plot(estimate, width),
        memory_plot(estimate, device, width),
        communication_plot(estimate.communication, width),
    )


def step_plot(estimate: Estimate, width: int) -> str:
    """The parts of a step, which add up to it."""
    whole = estimate.step_seconds.expected
    rows = [
        Bar(
            name=name,
            value=seconds,
            words=f"{format_seconds(seconds, beside=whole)}  {100 * seconds / whole:.0f} %",
        )
        for name, seconds in sorted(step_terms(estimate).items(), key=lambda one: -one[1])
    ]
    heading = f"A step of {format_seconds(whole)}, by what it is spent on"
    return headed(heading, bars(rows, width=width), width)


def memory_plot(estimate: Estimate, device: Device, width: int) -> str:
    """The parts of the fullest device's peak, as predicted; a whole bar is the device's memory."""
    memory, factor = estimate.memory, peak_factor(device)
    terms = sorted(memory.terms.items(), key=lambda one: -one[1])
    free = device.memory_bytes - factor * memory.peak_device_bytes
    rows = [Bar(name=name, value=size, words=format_gib(size)) for name, size in terms if size]
    if factor != 1:
        more = (factor - 1) * memory.peak_device_bytes
        rows.append(Bar(name="your runs", value=more, words=format_gib(more)))
    name = "free" if free >= 0 else "too much"
    rows.append(Bar(name=name, value=0.0, rest=abs(free), words=format_gib(abs(free))))
    heading = f"Memory at the peak of the fullest device, of {format_gib(device.memory_bytes)}"
    return headed(heading, bars(rows, width=width, whole=device.memory_bytes), width)


def communication_plot(costs: Sequence[CollectiveCost], width: int) -> str:
    """Each collective of a step: what of its time is exposed, and what other work hides."""
    ordered = sorted(costs, key=lambda one: -one.seconds)[:MOST_BARS]
    rows = [
        Bar(
            name=f"{one.collective} {one.axis} ({one.level})",
            value=min(one.exposed_seconds, one.seconds),
            rest=max(0.0, one.seconds - one.exposed_seconds),
            words=f"{format_seconds(one.exposed_seconds)} of {format_seconds(one.seconds)}",
        )
        for one in ordered
    ]
    return headed(
        "Collectives of a step: exposed, and behind that hidden", bars(rows, width=width), width
    )


def frontier_plot(result: SearchResult, device: Device, *, width: int) -> str:
    """All layouts that were priced, by step and memory; those of the list by their ranks."""
    ranks = {one.layout: one.rank for one in result.ranked}
    listed = [(one.layout, one.estimate) for one in result.ranked]
    others = [one for one in result.explored if one[0] not in ranks]
    points = [
        Mark(
            one.step_seconds.expected,
            expected_peak_bytes(one.memory, device) / GIB,
            _rank(ranks.get(layout)),
        )
        for layout, one in (*listed, *others)
    ]
    slowest = max(point.x for point in points)
    peaks = [point.y for point in points]
    digits = 1 if max(peaks) - min(peaks) >= 0.2 else 3
    chart = marks(
        points,
        x=Axis(words="a step", label=lambda seconds: format_seconds(seconds, beside=slowest)),
        y=Axis(
            words="GiB at the peak of the fullest device", label=lambda gib: f"{gib:.{digits}f}"
        ),
        width=width,
    )
    tied = result.listed.tied
    alike = f"; 1 to {_rank(tied[-1])} tie with the fastest" if tied else ""
    return blocks(
        headed(frontier_words(result), chart, width),
        wrapped(f"Signs are ranks, . is not listed{alike}.", width=width),
    )


def frontier_words(result: SearchResult) -> str:
    """Which of the searched layouts are drawn, and why the others are not."""
    drawn = len({layout for layout, _ in result.explored} | {one.layout for one in result.ranked})
    rejected = sum(count for _, count in result.rejected)
    return (
        f"The {drawn:,} layouts that were priced. Of {result.candidates:,} searched "
        f"{result.feasible:,} fit, {result.pruned:,} are slower by a bound, {rejected:,} were "
        "rejected."
    )


def _rank(rank: int | None) -> str:
    return "." if rank is None or rank > len(RANKS) else RANKS[rank - 1]


def tried_plot(answer: Answer, *, width: int) -> str:
    """Numbers of GPUs that were looked at, by the tokens a second of each; nothing of one."""
    offers = [one.offer for one in answer.tried]
    if len({offer.gpus for offer in offers}) < 2:
        return ""
    points = [
        Mark(offer.gpus, offer.tokens_per_second, "o" if index != answer.chosen else "#")
        for index, offer in enumerate(offers)
    ]
    heading = "The numbers of GPUs that were looked at; # is the best"
    return headed(heading, _over_gpus(points, width), width)


def sweep_plot(curves: Sequence[Curve], *, width: int) -> str:
    """Tokens a second of all curves over their numbers of GPUs, and what each would be if the
    first point's rate of a GPU were kept."""
    points: list[Mark] = []
    for letter, one in zip(LETTERS, curves, strict=False):
        points += [Mark(rate.gpus, rate.tokens_per_second, letter) for rate in one.rates]
    for one in curves:
        if one.rates:
            first = one.rates[0]
            ideal = first.tokens_per_second / first.gpus
            points += [Mark(rate.gpus, ideal * rate.gpus, ".") for rate in one.rates[1:]]
    names = "; ".join(
        f"{letter} {one.hardware}, {one.scaling}"
        for letter, one in zip(LETTERS, curves, strict=False)
    )
    return headed(
        f"{names}; . is the rate of the first point kept", _over_gpus(points, width), width
    )


def _over_gpus(points: Sequence[Mark], width: int) -> str:
    y = Axis(words="Tokens a second", label=format_count, is_log=True)
    return marks(points, x=gpus_axis(points), y=y, width=width)


def compare_plot(entries: Sequence[Entry], *, width: int) -> str:
    """Tokens a second of each with its band, and the memory of its fullest device."""
    found = [(one.name, one.priced) for one in entries if one.priced is not None]
    return blocks(
        rates_plot(found, width),
        headed(
            "Memory at the peak of the fullest device, and behind it what is free",
            bars([_memory_bar(name, one) for name, one in found], width=width),
            width,
        ),
    )


def rates_plot(found: Sequence[tuple[str, Priced]], width: int) -> str:
    """Tokens a second of each with its band."""
    rows = [rate_band(name, one) for name, one in found]
    return headed("Tokens a second, with the 80 % band", bands(rows, width=width), width)


def rate_band(name: str, one: Priced) -> Band:
    """Tokens a second."""
    rate = one.estimate.step_seconds.inverse(one.estimate.tokens_per_second)
    return Band(
        name=name,
        lower=rate.lower,
        expected=rate.expected,
        upper=rate.upper,
        words=f"{rate.expected:,.0f}",
    )


def _memory_bar(name: str, one: Priced) -> Bar:
    device = one.case.cluster.device
    peak = expected_peak_bytes(one.estimate.memory, device)
    return Bar(
        name=name,
        value=peak,
        rest=max(0.0, device.memory_bytes - peak),
        words=f"{format_gib(peak)} of {format_gib(device.memory_bytes)}",
    )


def what_if_plot(answer: WhatIf, *, width: int) -> str:
    """The plan and its answers by tokens a second, and which parts of the step change."""
    found = [("as it is", answer.before)]
    if answer.same is not None and not answer.is_same:
        found.append(("the same layout then", answer.same))
    if answer.best is not None:
        found.append(("the best then", answer.best))
    return blocks(rates_plot(found, width), _changes_plot(found, width))


def _changes_plot(found: Sequence[tuple[str, Priced]], width: int) -> str:
    if len(found) < 2:
        return ""
    terms = difference(found[0][1], found[-1][1]).time
    changed = sorted((one for one in terms if one.change), key=lambda one: -abs(one.change))
    rows = [
        Bar(
            name=one.name,
            value=one.change,
            words=f"{'+' if one.change > 0 else ''}{format_seconds(one.change)}",
        )
        for one in changed[:MOST_BARS]
    ]
    return headed(f"A step, {found[-1][0]}: what changes", changes(rows, width=width), width)


def sensitivity_plot(answer: Followed, *, width: int) -> str:
    """What 1 % more of each input changes the step by, the inputs that count most first."""
    smooth = [one for one in answer.found if not one.counted and one.step]
    strongest = sorted(smooth, key=lambda one: -abs(one.step))[:MOST_BARS]
    rows = [
        Bar(name=field_words(one.field), value=one.step, words=f"{one.step:+.3f} %")
        for one in strongest
    ]
    heading = "1 % more of an input changes the step by (mean of more and less)"
    return headed(heading, changes(rows, width=width), width)


def verify_plot(rows: Sequence[Comparison], measured: Measured, *, width: int) -> str:
    """Measured over predicted of each quantity, with the band; and the run, step by step."""
    known = [row for row in rows if row.measured is not None and row.predicted]
    found = [
        Band(
            name=row.quantity.replace("_", " "),
            lower=row.band_ratio.lower,
            expected=row.band_ratio.expected,
            upper=row.band_ratio.upper,
            measured=row.measured / row.predicted,
            words=f"{row.measured / row.predicted:.2f}",
        )
        for row in known
        if row.measured is not None
    ]
    return blocks(
        headed(
            "Measured (x) over predicted (o), with the 80 % band", bands(found, width=width), width
        ),
        curve_plot(measured, "loss", "Loss", lambda value: f"{value:.3g}", width),
        curve_plot(measured, "step_seconds", "Seconds of a step", format_seconds, width),
    )


def curve_plot(
    measured: Measured, quantity: Quantity, words: str, label: Callable[[float], str], width: int
) -> str:
    """What the run reported step by step; nothing where it did not."""
    points = curve(measured.steps, quantity, most=MOST_STEPS)
    if len(points) < 2:
        return ""
    return marks(
        [Mark(point.step, point.value, "o") for point in points],
        x=Axis(words="steps", label=lambda step: f"{step:,.0f}"),
        y=Axis(words=words, label=label),
        width=width,
    )
