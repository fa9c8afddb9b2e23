"""Reports of several answers: plans or questions beside each other, and curves over GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpplan import __version__
from fsdpplan.cost.band import expected_peak_bytes
from fsdpplan.report.scaling import curve_name, scaling_section
from fsdpplan.report.values import (
    Block,
    Cell,
    Chart,
    Fact,
    Facts,
    Note,
    Notes,
    Report,
    Section,
    Table,
    Words,
    cell,
    sentence,
    written,
)
from fsdpplan.search.advice.difference import Priced, changed_inputs, step_terms
from fsdpplan.search.advice.words import chance_words, degrees, policy
from fsdpplan.search.scaling import Curve, efficiency, knee_words, pairs
from fsdpplan.units import MILLION, format_count, format_gib, format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of those that are compared."""

    name: str
    """A letter."""
    what: str
    """The question in a line."""
    priced: Priced | None
    """None where nothing fits."""
    problem: str = ""
    """Why nothing does."""


def compare_report(
    found: Sequence[Compared],
    *,
    verdicts: Sequence[str],
    assumptions: Sequence[str],
    warnings: Sequence[str],
) -> Report:
    """A page of plans or questions side by side; `verdicts` say what of it can be told apart."""
    fitting = [(one.name, one.priced) for one in found if one.priced is not None]
    sections = [_in_short(found, fitting, verdicts)]
    if fitting:
        sections += [_time(fitting), _memory(fitting)]
    if len(fitting) > 1:
        sections.append(_inputs(fitting))
    if assumptions or warnings:
        sections.append(_grounds(assumptions, warnings))
    models = dict.fromkeys(one.case.model.name for _, one in fitting)
    return Report(
        title=f"{len(found)} plans side by side",
        subtitle=", ".join(models) or "nothing fits",
        sections=tuple(sections),
        made_by=f"fsdpplan {__version__}",
        about="fsdpplan compare",
    )


def _in_short(
    found: Sequence[Compared], fitting: Sequence[tuple[str, Priced]], verdicts: Sequence[str]
) -> Section:
    blocks: list[Block] = [Facts(tuple(map(_fact, found)))]
    if verdicts:
        blocks.append(Words(tuple(verdicts)))
    if fitting:
        blocks += [_rates(fitting), _table(fitting)]
    return Section(name="summary", title="In short", blocks=tuple(blocks))


def _fact(one: Compared) -> Fact:
    if one.priced is None:
        return Fact(
            name=f"{one.name}: {one.what}", value="nothing fits", note=one.problem, tone="bad"
        )
    rate, layout = one.priced.estimate.tokens_per_second, one.priced.case.layout
    return Fact(
        name=f"{one.name}: {one.what}",
        value=f"{rate:,.0f} tokens/s",
        exact=rate,
        note=f"{degrees(layout)}; {policy(layout)}",
    )


def _rates(fitting: Sequence[tuple[str, Priced]]) -> Chart:
    rows = []
    for name, one in fitting:
        step = one.estimate.step_seconds
        rate = step.inverse(one.estimate.tokens_per_second)
        rows.append(
            {
                "name": name,
                "lower": rate.lower,
                "expected": rate.expected,
                "upper": rate.upper,
                "details": [
                    ["layout", degrees(one.case.layout)],
                    ["a step", format_seconds(step.expected)],
                    ["MFU", format_percent(one.estimate.mfu_fraction)],
                ],
            }
        )
    name, most = max(fitting, key=lambda pair: pair[1].estimate.tokens_per_second)
    return Chart(
        name="rates",
        kind="intervals",
        title="Tokens a second, with 80 % bands",
        says=f"{name} does most: {most.estimate.tokens_per_second:,.0f} a second. What two share "
        "cancels between them: bands that overlap may still be told apart.",
        data={"unit": "count", "rows": rows},
    )


def _table(fitting: Sequence[tuple[str, Priced]]) -> Table:
    def row(name: str, cells: Iterable[Cell | str]) -> tuple[Cell | str, ...]:
        return (name, *cells)

    all_of = [one for _, one in fitting]
    estimates = [one.estimate for one in all_of]
    rows = [
        row("step", (cell(one.step_seconds.expected, "seconds") for one in estimates)),
        row("band from", (cell(one.step_seconds.lower, "seconds") for one in estimates)),
        row("band to", (cell(one.step_seconds.upper, "seconds") for one in estimates)),
        row("tokens a second", (cell(one.tokens_per_second, "whole") for one in estimates)),
        row("of each GPU", (cell(one.tokens_per_second_per_gpu, "whole") for one in estimates)),
        row("MFU", (cell(one.mfu_fraction, "fraction") for one in estimates)),
        row("peak of the fullest device", (cell(_peak_bytes(one), "bytes") for one in all_of)),
        row("fits with a chance of", (_chance(one) for one in all_of)),
    ]
    for tokens in sorted({one.case.training.tokens for one in all_of} - {None}, key=str):
        assert tokens is not None
        rows.append(row("to train", (cell(one.seconds_for(tokens), "seconds") for one in all_of)))
        rows.append(row("GPU hours", (cell(one.gpu_hours_for(tokens), "whole") for one in all_of)))
        costs = [one.cost_for(tokens) for one in all_of]
        if any(cost is not None for cost in costs):
            rows.append(row("cost", ("" if one is None else cell(one, "dollars") for one in costs)))
    return Table(
        caption="Side by side",
        columns=("", *(name for name, _ in fitting)),
        rows=tuple(rows),
    )


def _peak_bytes(one: Priced) -> float:
    return expected_peak_bytes(one.estimate.memory, one.case.cluster.device)


def _chance(one: Priced) -> Cell:
    chance = one.estimate.memory.fits_fraction
    return Cell("not known" if chance is None else chance_words(chance), chance)


def _time(fitting: Sequence[tuple[str, Priced]]) -> Section:
    """Of a million tokens, since batches may differ."""
    terms = {
        name: {
            term: seconds * MILLION / one.case.training.tokens_per_step
            for term, seconds in step_terms(one.estimate).items()
        }
        for name, one in fitting
    }
    return Section(
        name="time",
        title="Where the time goes",
        blocks=(
            _stacked(
                "time",
                "Time for a million tokens",
                terms,
                unit="seconds",
                says="Each bar adds up to the time of a step, over the millions of tokens in it.",
            ),
        ),
    )


def _memory(fitting: Sequence[tuple[str, Priced]]) -> Section:
    terms = {name: one.estimate.memory.terms for name, one in fitting}
    devices: dict[int, list[str]] = {}
    for name, one in fitting:
        devices.setdefault(one.case.cluster.device.memory_bytes, []).append(name)
    return Section(
        name="memory",
        title="Memory of the fullest device",
        blocks=(
            _stacked(
                "memory",
                "The peak, by what it holds",
                terms,
                unit="bytes",
                says="; ".join(
                    f"{name} needs {format_gib(_peak_bytes(one))} of "
                    f"{format_gib(one.case.cluster.device.memory_bytes)}"
                    for name, one in fitting
                )
                + ".",
                limits=[
                    {"name": " ".join(names), "value": size} for size, names in devices.items()
                ],
            ),
        ),
    )


def _stacked(
    name: str,
    title: str,
    terms: dict[str, dict[str, Any]],
    *,
    unit: Any,
    says: str,
    limits: Sequence[dict[str, Any]] = (),
) -> Chart:
    """A bar each, by its terms; the numbers in a table."""
    names = dict.fromkeys(term for one in terms.values() for term in one)
    largest = sorted(names, key=lambda term: -max(one.get(term, 0) for one in terms.values()))
    drawn = [term for term in largest if any(one.get(term, 0) > 0 for one in terms.values())]
    return Chart(
        name=name,
        kind="bars",
        title=title,
        says=says,
        data={
            "unit": unit,
            "categories": list(terms),
            "series": [
                {"name": term, "values": [max(0, one.get(term, 0)) for one in terms.values()]}
                for term in drawn
            ],
            "limits": list(limits),
        },
        table=Table(
            caption=title,
            columns=("", *terms),
            rows=tuple(
                (term, *(cell(one.get(term), unit) for one in terms.values())) for term in largest
            ),
            folded=True,
        ),
    )


def _inputs(fitting: Sequence[tuple[str, Priced]]) -> Section:
    """In which inputs the others differ from the first."""
    (first, before), *others = fitting
    rows = [
        (name, one.name.replace("_", " "), str(one.before), str(one.after))
        for name, after in others
        for one in changed_inputs(before.case, after.case)
    ]
    return Section(
        name="inputs",
        title="What was asked otherwise",
        says="" if rows else f"All were asked the same as {first}.",
        blocks=(
            (
                Table(
                    caption=f"Inputs that differ from {first}",
                    columns=("of", "input", first, "its own"),
                    rows=tuple(rows),
                ),
            )
            if rows
            else ()
        ),
    )


def _grounds(assumptions: Sequence[str], warnings: Sequence[str]) -> Section:
    notes = [Note(text=one, tone="watch") for one in warnings]
    notes += [Note(text=one) for one in assumptions]
    return Section(name="grounds", title="What it rests on", blocks=(Notes(tuple(notes)),))


def sweep_report(model: str, curves: Sequence[Curve], *, assumptions: Sequence[str]) -> Report:
    """A page of curves over numbers of GPUs."""
    section = scaling_section(curves, price_unit="count")
    sections = [_sweep_in_short(model, curves), *([] if section is None else [section])]
    machines = _machines(curves)
    if machines is not None:
        sections.append(machines)
    if assumptions:
        sections.append(_grounds(assumptions, ()))
    return Report(
        title=f"How training {model} scales",
        subtitle=", ".join(dict.fromkeys(curve.hardware for curve in curves)),
        sections=tuple(sections),
        made_by=f"fsdpplan {__version__}",
        about="fsdpplan sweep",
    )


def _sweep_in_short(model: str, curves: Sequence[Curve]) -> Section:
    """What more GPUs bring, in words, and what most of them do."""
    fitting = [curve for curve in curves if curve.rates]
    words = [f"{_curve_sentence(model, curve)}{_training_sentence(curve)}" for curve in fitting]
    words += [
        sentence(f"nothing fits on {curve_name(curve)}: {curve.points[-1].problem}")
        for curve in curves
        if not curve.rates
    ]
    facts = tuple(map(_most, fitting))
    return Section(
        name="summary",
        title="In short",
        blocks=(Words(tuple(words)), *([Facts(facts)] if facts else [])),
    )


def _curve_sentence(model: str, curve: Curve) -> str:
    """From the fewest GPUs that do to the most."""
    first, last = curve.rates[0], curve.rates[-1]
    kept = "the global batch stays"
    if curve.scaling == "weak":
        kept = "the batch of each GPU stays"
    begins = f"Training {model} on {curve.hardware}, where {kept}"
    if first.gpus == last.gpus:
        return (
            f"{begins}: {first.gpus:,} GPUs do {first.tokens_per_second:,.0f} tokens a second; no "
            "other number of these fits."
        )
    times = last.tokens_per_second / first.tokens_per_second
    return (
        f"{begins}: from {first.gpus:,} to {last.gpus:,} GPUs, {last.gpus / first.gpus:.3g} times "
        f"as many, tokens a second grow {times:.3g} times, from {first.tokens_per_second:,.0f} to "
        f"{last.tokens_per_second:,.0f}: each GPU keeps "
        f"{format_percent(efficiency(first, last))} of what it does among the fewest."
    )


def _training_sentence(curve: Curve) -> str:
    """What the whole training takes on the fewest and on the most; empty where its tokens are not
    said."""
    found = [(point, point.priced) for point in curve.points if point.priced is not None]
    tokens = found[0][1].case.training.tokens
    if tokens is None:
        return ""
    parts = []
    for point, priced in (found[0], *found[1:][-1:]):
        price = curve.price(point, tokens)
        dear = "" if price is None else f", for {price:,.0f}"
        parts.append(f"{format_seconds(priced.seconds_for(tokens))} on {point.gpus:,} GPUs{dear}")
    return f" {format_count(tokens)} tokens take {'; '.join(parts)}."


def _most(curve: Curve) -> Fact:
    """Its last point, and its knee."""
    last = curve.rates[-1]
    return Fact(
        name=f"{curve_name(curve)}, {last.gpus:,} GPUs",
        value=f"{last.tokens_per_second:,.0f} tokens/s",
        exact=last.tokens_per_second,
        note=knee_words(curve),
    )


def _machines(curves: Sequence[Curve]) -> Section | None:
    """Machines against the first of them, where there are several."""
    found = [one for one in pairs(curves) if one[2] is not None]
    if not found:
        return None
    rows = []
    for curve, point, against in found:
        assert against is not None
        lower, upper = against.ratio_band
        rows.append(
            (
                curve_name(curve),
                cell(point.gpus, "whole"),
                cell(1 / against.ratio, "ratio"),
                f"{written(1 / upper, 'ratio')} to {written(1 / lower, 'ratio')}",
                "yes" if against.told_apart else "no",
            )
        )
    first = curves[0].hardware
    return Section(
        name="machines",
        title="Machines side by side",
        says=f"Tokens a second over those of {first} on as many GPUs.",
        blocks=(
            Table(
                caption=f"Against {first}",
                columns=("machine", "GPUs", "times", "80 % band", "told apart"),
                rows=tuple(rows),
            ),
        ),
    )
