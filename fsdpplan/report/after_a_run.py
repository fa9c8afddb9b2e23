"""After a run: what was measured beside what was predicted, and the run step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from fsdpplan.report.how_it_went import Learnt, learnt_section, nccl_section, went_section
from fsdpplan.report.values import (
    Block,
    Cell,
    Chart,
    Fact,
    Facts,
    Note,
    Notes,
    Section,
    Table,
    Tone,
    Unit,
    cell,
    sentence,
    written,
)
from fsdpplan.run.aftermath import Aftermath
from fsdpplan.run.compare import AxisComparison, Comparison, overlap, waits
from fsdpplan.run.curves import CurvePoint, Quantity, curve
from fsdpplan.run.verify import communication, comparison
from fsdpplan.spec.plan import Interval
from fsdpplan.units import format_percent, format_seconds

STEEP = 3.0
"""Times the median step that a chart of them is high, where some take longer."""

WORDS = {
    "step_seconds": "a step",
    "tokens_per_second": "tokens a second",
    "mfu_fraction": "MFU",
    "peak_allocated_bytes": "memory allocated",
    "peak_reserved_bytes": "memory reserved",
}
UNITS: dict[str, Unit] = {
    "seconds": "seconds",
    "tokens_per_second": "whole",
    "fraction": "fraction",
    "bytes": "bytes",
}


def after_sections(left: Aftermath, learnt: Learnt | None) -> tuple[Section, ...]:
    """All of them, those first that decide."""
    found = (
        _measured(left),
        _steps(left),
        went_section(left),
        nccl_section(left),
        learnt_section(left, learnt),
    )
    return tuple(one for one in found if one is not None)


def _measured(left: Aftermath) -> Section:
    rows, notes = comparison(left.run), left.notes
    # what has a note is no measurement of what was predicted
    known = [row for row in rows if row.measured is not None and row.predicted and not row.note]
    blocks: list[Block] = [Facts(tuple(map(_fact, rows)))]
    if known:
        blocks.append(_ratios(known))
    blocks.append(_comparison_table(rows))
    axes = communication(left.run)
    if axes:
        blocks += _communication(axes, left)
    if notes:
        blocks.append(Notes(tuple(Note(text=sentence(note), tone="watch") for note in notes)))
    return Section(
        name="measured",
        title="Measured beside predicted",
        says=f"{left.run.measured.measured_steps:,} steps of {left.run.plan.cluster.gpus:,} ranks "
        "were measured, the first few left out.",
        blocks=tuple(blocks),
    )


def _fact(row: Comparison) -> Fact:
    unit = UNITS[row.unit]
    tone: Tone = "plain"
    if row.inside_band is not None:
        tone = "good" if row.inside_band else "watch"
    said = f"{written(row.predicted, unit)} predicted"
    if row.lower is not None and row.upper is not None:
        said += f", {written(row.lower, unit)} to {written(row.upper, unit)} in four cases of five"
    if row.measured is not None and row.error_fraction is not None:
        off = "high" if row.error_fraction > 0 else "low"
        said += f"; predicted {format_percent(abs(row.error_fraction))} too {off}"
    if row.note:
        said += f"; {row.note}"
    return Fact(
        name=sentence(WORDS[row.quantity]).rstrip("."),
        value="not reported" if row.measured is None else written(row.measured, unit),
        exact=row.measured,
        note=said,
        tone=tone,
    )


def _ratios(rows: Sequence[Comparison]) -> Chart:
    """Each as a share of what was predicted, so that all are on one axis."""
    step = next((row for row in rows if row.quantity == "step_seconds"), rows[0])
    where = {True: "lies inside", False: "lies outside", None: "has no"}[step.inside_band]
    return Chart(
        name="measured-over-predicted",
        kind="intervals",
        title="Measured over predicted; 1.00 is as predicted",
        says=f"The measured step {where} its 80 % band.",
        data={
            "unit": "ratio",
            "rows": [
                {
                    "name": WORDS[row.quantity],
                    "lower": row.band_ratio.lower,
                    "expected": row.band_ratio.expected,
                    "upper": row.band_ratio.upper,
                    "measured": (row.measured or 0.0) / row.predicted,
                    "details": [
                        ["was predicted", written(row.predicted, UNITS[row.unit])],
                        ["was measured", written(row.measured or 0.0, UNITS[row.unit])],
                    ],
                }
                for row in rows
            ],
            "marks": [{"value": 1, "name": "as predicted"}],
        },
    )


def _comparison_table(rows: Sequence[Comparison]) -> Table:
    return Table(
        caption="Predicted and measured",
        columns=("quantity", "predicted", "band from", "to", "measured", "off by"),
        rows=tuple(
            (
                WORDS[row.quantity],
                cell(row.predicted, UNITS[row.unit]),
                cell(row.lower, UNITS[row.unit]),
                cell(row.upper, UNITS[row.unit]),
                cell(row.measured, UNITS[row.unit]),
                Cell(
                    "" if row.error_fraction is None else f"{100 * row.error_fraction:+.1f} %",
                    row.error_fraction,
                ),
            )
            for row in rows
        ),
        folded=True,
    )


def _communication(axes: Sequence[AxisComparison], left: Aftermath) -> list[Block]:
    """Of the steps that were profiled."""
    hidden, found = overlap(axes), waits(axes)
    blocks: list[Block] = []
    if found:
        longest = found[0]
        blocks.append(
            Chart(
                name="waits",
                kind="bars",
                title="What a profiled step waits for, by the axis of the mesh",
                says=f"Most it waits for {longest.axis}.",
                data={
                    "unit": "seconds",
                    "beside": True,
                    "categories": [one.axis for one in found],
                    "series": [
                        {"name": "predicted", "values": [one.predicted_seconds for one in found]},
                        {"name": "measured", "values": [one.measured_seconds for one in found]},
                    ],
                },
            )
        )
    if hidden is not None:
        predicted = hidden.predicted_fraction
        idle = left.run.measured.profiled
        facts = [
            Fact(
                name="Communication that is hidden",
                value=format_percent(hidden.measured_fraction),
                exact=hidden.measured_fraction,
                note="" if predicted is None else f"{format_percent(predicted)} predicted",
            )
        ]
        if idle is not None:
            facts.append(
                Fact(
                    name="Device idle in a step",
                    value=format_seconds(idle.idle_seconds),
                    exact=idle.idle_seconds,
                )
            )
        blocks.append(Facts(tuple(facts)))
    blocks.append(
        Table(
            caption="Collectives of a profiled step",
            columns=("collective", "predicted", "measured", "exposed, predicted", "measured"),
            rows=tuple(
                (
                    f"{row.collective} over {row.axis}",
                    cell(row.predicted_seconds, "seconds"),
                    cell(row.measured.seconds if row.measured else None, "seconds"),
                    cell(row.predicted_exposed_seconds, "seconds"),
                    cell(row.measured.exposed_seconds if row.measured else None, "seconds"),
                )
                for row in axes
            ),
            folded=True,
        )
    )
    return blocks


def _steps(left: Aftermath) -> Section | None:
    """Loss, step, MFU and memory over the steps of all starts."""
    estimate = left.run.plan.estimate
    step = estimate.step_seconds
    mfu = step.inverse(estimate.mfu_fraction)
    charts = (
        _curve(left, "loss", "Loss", "loss", "plain"),
        _curve(left, "step_seconds", "Time of a step", "a step", "seconds", predicted=step),
        _curve(
            left,
            "mfu_fraction",
            "MFU: useful work over the peak of the hardware",
            "MFU",
            "fraction",
            predicted=replace(mfu, upper=min(1.0, mfu.upper)),
        ),
        _memory(left),
    )
    blocks = tuple(one for one in charts if one is not None)
    if not blocks:
        return None
    last = left.steps[-1].step
    again = ""
    if left.resumed_at:
        at = ", ".join(f"{one:,}" for one in left.resumed_at)
        again = f" It went on from a checkpoint at step {at}."
    return Section(
        name="steps",
        title="The run, step by step",
        says=f"{len(left.steps):,} reported steps up to step {last:,}.{again}",
        blocks=blocks,
    )


def _memory(left: Aftermath) -> Chart | None:
    """What torch's allocator reserves; of CPUs, which have none, what the process takes."""
    if not left.run.plan.case.on_cuda:
        return _curve(left, "reserved_bytes", "Memory of the process", "memory", "bytes")
    return _curve(
        left,
        "reserved_bytes",
        "Memory that torch has reserved",
        "memory",
        "bytes",
        predicted_value=float(left.run.plan.estimate.memory.peak_reserved_bytes),
    )


def _curve(
    left: Aftermath,
    quantity: Quantity,
    title: str,
    words: str,
    unit: Unit,
    *,
    predicted: Interval | None = None,
    predicted_value: float | None = None,
) -> Chart | None:
    points = curve(left.steps, quantity)
    if len(points) < 2:
        return None
    reported = sum(getattr(one, quantity) is not None for one in left.steps)
    first, last = points[0], points[-1]
    series: list[dict[str, Any]] = [
        {"name": "measured", "points": [[point.step, point.value] for point in points]}
    ]
    ends = (first.step, last.step)
    top = _top(points, predicted) if quantity == "step_seconds" else None
    if predicted is not None:
        series.append(
            {
                "name": "predicted",
                "points": [[step, predicted.expected] for step in ends],
                "band": [[step, predicted.lower, predicted.upper] for step in ends],
                "dashed": True,
            }
        )
    if predicted_value is not None:
        series.append(
            {
                "name": "predicted",
                "points": [[step, predicted_value] for step in ends],
                "dashed": True,
            }
        )
    return Chart(
        name=quantity.replace("_", "-"),
        kind="lines",
        title=title,
        says=_curve_words(points, reported, unit, top),
        data={
            "x": {"name": "step", "unit": "whole"},
            "y": {"name": words, "unit": unit, **({} if top is None else {"min": 0, "max": top})},
            "series": series,
            "marks": [
                {"axis": "x", "value": step, "name": "started again"} for step in left.resumed_at
            ],
        },
    )


def _top(points: Sequence[CurvePoint], predicted: Interval | None) -> float | None:
    """Where the chart ends, if some steps are so slow that the others could not be told apart: the
    first one of a run compiles. None: nothing is beyond it."""
    usual = median(point.value for point in points)
    top = max(STEEP * usual, 1.1 * predicted.upper if predicted else 0.0)
    return top if max(point.value for point in points) > top else None


def _curve_words(points: Sequence[CurvePoint], reported: int, unit: Unit, top: float | None) -> str:
    values = [point.value for point in points]
    words = (
        f"From {written(values[0], unit)} to {written(values[-1], unit)}; lowest "
        f"{written(min(values), unit)}, highest {written(max(values), unit)}."
    )
    if top is not None:
        beyond = [point for point in points if point.value > top]
        words += (
            f" {len(beyond):,} of them {'is' if len(beyond) == 1 else 'are'} beyond the chart, the "
            f"first at step {beyond[0].step:,}."
        )
    if len(points) < reported:
        words += (
            f" {len(points):,} of {reported:,} steps are drawn: of each stretch its lowest and its "
            "highest."
        )
    return words
