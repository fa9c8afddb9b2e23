"""What a plan hangs on: how its step follows each input, and what deserves to be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpplan.report.values import Block, Cell, Chart, Section, Table, cell
from fsdpplan.search.advice.difference import Priced
from fsdpplan.search.advice.measurement import Means, Measurement, band_fraction
from fsdpplan.search.advice.sensitivity import (
    LEAST_ELASTICITY,
    Evidence,
    Sensitivity,
    evidence_of,
    field_words,
    value_words,
)
from fsdpplan.units import format_percent

MOST_BARS = 16

MEANS: Mapping[Means, str] = {
    "calibrate": "fsdpplan calibrate",
    "calibrate between nodes": "fsdpplan calibrate --nodes 2",
    "run": "fsdpplan run",
}
"""What measures it, as it is typed."""

RESTS_ON: Mapping[Evidence, str] = {
    "calibrated": "measured on your machines",
    "typed": "given by you",
    "fitted": "fitted to published measurements",
    "relative": "fitted to those of a relative",
    "datasheet": "printed by its maker",
    "guessed": "reasoned, and fitted to nothing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A layout, and what it follows."""

    subject: Priced
    found: tuple[Sensitivity, ...]
    measurements: tuple[Measurement, ...]
    sources: Mapping[str, str]


def hangs_on_section(followed: Followed) -> Section | None:
    """The section; None where the step follows nothing."""
    strongest = sorted(
        (one for one in followed.found if not one.counted and abs(one.step) >= LEAST_ELASTICITY),
        key=lambda one: (-abs(one.step), one.field),
    )
    if not strongest:
        return None
    blocks: list[Block] = [_tornado(strongest[:MOST_BARS], followed)]
    worth = [one for one in followed.measurements if one.gain > 0]
    if worth:
        blocks.append(_worth_measuring(worth, followed))
    return Section(
        name="sensitivities",
        title="What it hangs on",
        says="Each input was made 1 % larger and 1 % smaller in turn, of this layout, and the step "
        "predicted again: long bars are the numbers to be sure of.",
        blocks=tuple(blocks),
    )


def _tornado(strongest: Sequence[Sensitivity], followed: Followed) -> Chart:
    evidence = [evidence_of(followed.sources.get(one.field)) for one in strongest]
    first = strongest[0]
    return Chart(
        name="sensitivities",
        kind="tornado",
        title="What 1 % of an input changes the step by",
        says=f"Most it follows {field_words(first.field)}: 1 % more of it changes the step by "
        f"{first.step:+.2f} %.",
        data={
            "unit": "percent_change",
            "categories": [field_words(one.field) for one in strongest],
            "series": [
                {
                    "name": "1 % more of it",
                    "values": [None if one.more is None else one.more.step for one in strongest],
                },
                {
                    "name": "1 % less of it",
                    "values": [None if one.less is None else -one.less.step for one in strongest],
                },
            ],
            "details": [
                [["it is", value_words(one.field, one.value)], ["rests on", RESTS_ON[why]]]
                for one, why in zip(strongest, evidence, strict=True)
            ],
        },
        table=Table(
            caption="What 1 % of an input changes",
            columns=("input", "is", "rests on", "step, 1 % more", "1 % less", "peak, 1 % more"),
            rows=tuple(
                (
                    field_words(one.field),
                    Cell(value_words(one.field, one.value), one.value),
                    RESTS_ON[why],
                    cell(None if one.more is None else one.more.step, "percent_change"),
                    cell(None if one.less is None else -one.less.step, "percent_change"),
                    cell(None if one.more is None else one.more.memory, "percent_change"),
                )
                for one, why in zip(strongest, evidence, strict=True)
            ),
            folded=True,
        ),
    )


def _worth_measuring(worth: Sequence[Measurement], followed: Followed) -> Chart:
    case = followed.subject.case
    now = band_fraction(case)
    then = [band_fraction(case, [one]) for one in worth]
    return Chart(
        name="measure",
        kind="bars",
        title="What a measurement of each would leave of the band",
        says=f"The step is known to within {format_percent(now)} either way in four cases of five. "
        f"Most worth a measurement: {worth[0].unknown.name}, with {format_percent(then[0])} left.",
        data={
            "unit": "fraction",
            "categories": [one.unknown.name for one in worth],
            "series": [{"name": "half of the 80 % band then", "values": then}],
            "limits": [{"name": "now", "value": now}],
        },
        table=Table(
            caption="What is worth measuring, the worthiest first",
            columns=("unknown", "known to", "moves the step", "band then", "by"),
            rows=tuple(
                (
                    one.unknown.name,
                    cell(one.error_fraction, "fraction"),
                    cell(one.moves_fraction, "fraction"),
                    cell(band, "fraction"),
                    MEANS[one.unknown.means],
                )
                for one, band in zip(worth, then, strict=True)
            ),
            folded=True,
        ),
    )
