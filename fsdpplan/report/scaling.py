"""Scaling: what more GPUs bring, on one machine or several, and what the whole training then takes.

The bill of one layout: time, money and energy of its training, each with its band.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdpplan.cost.bill import Bill
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
    Unit,
    band_words,
    cell,
    written,
)
from fsdpplan.search.advice.words import degrees
from fsdpplan.search.scaling import Curve, Point
from fsdpplan.spec.plan import Interval
from fsdpplan.units import BILLION, format_count, format_percent


def bill_section(found: Bill | None, *, chance: float) -> Section | None:
    """What the training of a plan takes; None where its tokens are not said. `chance`: with which
    a deadline is to be met."""
    if found is None:
        return None
    facts = [
        _banded("Time", found.seconds, "seconds"),
        _banded("GPU hours", found.gpu_hours, "whole"),
    ]
    if found.cost is not None:
        facts.append(_banded("Money", found.cost, "dollars"))
    if found.energy_kwh is not None:
        facts.append(_banded("Energy", found.energy_kwh, "kwh"))
    if found.co2_kg is not None:
        facts.append(_banded("CO2, kg", found.co2_kg, "whole"))
    if found.deadline_chance is not None:
        met = found.deadline_chance >= chance
        facts.append(
            Fact(
                name="Chance to end in time",
                value=format_percent(found.deadline_chance),
                exact=found.deadline_chance,
                note=f"{format_percent(chance)} are asked for",
                tone="good" if met else "bad",
            )
        )
    return Section(
        name="bill",
        title="What the whole training takes",
        says=f"{found.steps:,} steps on {found.gpus:,} GPUs, without failures.",
        blocks=(Facts(tuple(facts)),),
    )


def _banded(name: str, value: Interval, unit: Unit) -> Fact:
    return Fact(
        name=name,
        value=written(value.expected, unit),
        exact=value.expected,
        note=f"80 % band {written(value.lower, unit)} to {written(value.upper, unit)}",
    )


def curve_name(curve: Curve) -> str:
    """`dgx-h100, strong`."""
    return f"{curve.hardware}, {curve.scaling}"


def scaling_section(curves: Sequence[Curve], *, price_unit: Unit = "dollars") -> Section | None:
    """The section; None where nothing fits anywhere."""
    fitting = [curve for curve in curves if curve.rates]
    if not fitting:
        return None
    blocks: list[Block] = [_rates(fitting)]
    if any(len(curve.rates) > 1 for curve in fitting):
        blocks.append(_efficiencies(fitting))
    blocks += _whole(fitting, price_unit)
    blocks.append(_points(curves))
    missing = tuple(_misses(curves))
    if missing:
        blocks.append(Notes(missing))
    return Section(name="scaling", title="How it scales", blocks=tuple(blocks))


def _fitting(curve: Curve) -> list[Point]:
    return [point for point in curve.points if point.priced is not None]


def _interval(point: Point) -> Interval:
    """Tokens a second."""
    assert point.priced is not None
    found = point.priced.estimate
    return found.step_seconds.inverse(found.tokens_per_second)


def _gpus_axis(curves: Sequence[Curve]) -> dict[str, Any]:
    numbers = sorted({rate.gpus for curve in curves for rate in curve.rates})
    return {"name": "GPUs", "unit": "whole", "log": len(numbers) > 1, "ticks": numbers}


def _rates(curves: Sequence[Curve]) -> Chart:
    series: list[dict[str, Any]] = []
    for index, curve in enumerate(curves):
        rates = [(point.gpus, _interval(point)) for point in _fitting(curve)]
        series.append(
            {
                "name": curve_name(curve),
                "color": index,
                "points": [[gpus, rate.expected] for gpus, rate in rates],
                "band": [[gpus, rate.lower, rate.upper] for gpus, rate in rates],
            }
        )
    first = curves[0].rates[0]
    each = first.tokens_per_second / first.gpus
    ends = [rate.gpus for rate in curves[0].rates]
    series.append(
        {
            "name": f"as {first.gpus:,} GPUs of {curves[0].hardware} would go on",
            "color": 7,
            "dashed": True,
            "points": [[gpus, each * gpus] for gpus in ends],
        }
    )
    most = max((rate for curve in curves for rate in curve.rates), key=lambda one: one.gpus)
    return Chart(
        name="scaling",
        kind="lines",
        title="Tokens a second, by the number of GPUs",
        says=f"{most.gpus:,} GPUs do {most.tokens_per_second:,.0f} tokens a second; shaded are "
        "80 % bands, dashed is what a doubling could bring.",
        data={
            "x": _gpus_axis(curves),
            "y": {"name": "tokens a second", "unit": "count", "log": True},
            "series": series,
            "marks": _knees(curves),
        },
    )


def _knees(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    found = {
        curve.knee.gpus
        for curve in curves
        if curve.knee is not None and curve.knee.next_gpus is not None
    }
    return [{"axis": "x", "value": gpus, "name": "knee"} for gpus in sorted(found)]


def _efficiencies(curves: Sequence[Curve]) -> Chart:
    """Rate of a GPU, against the smallest point that fits."""
    series = []
    for index, curve in enumerate(curves):
        found = [
            (point.gpus, share, (curve.efficiency_error(point) or 0.0) * share)
            for point in _fitting(curve)
            if (share := curve.efficiency(point)) is not None
        ]
        series.append(
            {
                "name": curve_name(curve),
                "color": index,
                "points": [[gpus, share] for gpus, share, _ in found],
                "band": [[gpus, share - error, share + error] for gpus, share, error in found],
            }
        )
    least = min(share for one in series for _, share in one["points"])  # type: ignore[attr-defined]
    return Chart(
        name="efficiency",
        kind="lines",
        title="Of the rate of a GPU, what is kept",
        says=f"At the worst point {format_percent(least)} are kept.",
        data={
            "x": _gpus_axis(curves),
            "y": {"name": "kept", "unit": "fraction", "min": 0},
            "series": series,
            "marks": _knees(curves),
        },
    )


def _whole(curves: Sequence[Curve], price_unit: Unit) -> list[Block]:
    """Time and price of a whole training; of a billion tokens where only a price is known."""
    asked = {
        point.priced.case.training.tokens
        for curve in curves
        for point in _fitting(curve)
        if point.priced is not None
    } - {None}
    has_price = any(curve.price_per_gpu_hour is not None for curve in curves)
    if not asked and not has_price:
        return []
    tokens = next(iter(asked), None) or BILLION
    charts: list[Block] = [
        _over_gpus(
            curves,
            "duration",
            f"Time for {format_count(tokens)} tokens",
            ("time", "seconds"),
            lambda curve, point: _seconds(point, tokens),
        )
    ]
    what, unit = ("price", price_unit) if has_price else ("GPU hours", "whole")

    def dear(curve: Curve, point: Point) -> Interval | None:
        return _price(curve, point, tokens) if has_price else _hours(point, tokens)

    charts.append(
        _over_gpus(
            curves,
            "price",
            f"{what[0].upper()}{what[1:]} of {format_count(tokens)} tokens",
            (what, unit),
            dear,
        )
    )
    return charts


def _seconds(point: Point, tokens: int) -> Interval | None:
    if point.priced is None:
        return None
    step = point.priced.estimate.step_seconds
    return step.scaled(point.priced.seconds_for(tokens) / step.expected)


def _hours(point: Point, tokens: int) -> Interval | None:
    found = _seconds(point, tokens)
    return None if found is None else found.scaled(point.gpus / 3600)


def _price(curve: Curve, point: Point, tokens: int) -> Interval | None:
    hours, each = _hours(point, tokens), curve.price_per_gpu_hour
    return None if hours is None or each is None else hours.scaled(each)


def _over_gpus(
    curves: Sequence[Curve],
    name: str,
    title: str,
    axis: tuple[str, Unit],
    value: Callable[[Curve, Point], Interval | None],
) -> Chart:
    words, unit = axis
    is_log = name == "duration"
    series = []
    for index, curve in enumerate(curves):
        found = [
            (point.gpus, one)
            for point in _fitting(curve)
            if (one := value(curve, point)) is not None
        ]
        if found:
            series.append(
                {
                    "name": curve_name(curve),
                    "color": index,
                    "points": [[gpus, one.expected] for gpus, one in found],
                    "band": [[gpus, one.lower, one.upper] for gpus, one in found],
                }
            )
    ends = [(one["points"][0], one["points"][-1]) for one in series]  # type: ignore[index]
    (few, least), (many, last) = ends[0]
    return Chart(
        name=name,
        kind="lines",
        title=title,
        says=f"{few:,} GPUs: {written(least, unit)}; {many:,}: {written(last, unit)}.",
        data={
            "x": _gpus_axis(curves),
            "y": {"name": words, "unit": unit, "log": is_log, **({} if is_log else {"min": 0})},
            "series": series,
            "marks": _knees(curves),
        },
    )


def _points(curves: Sequence[Curve]) -> Table:
    rows: list[tuple[Cell | str, ...]] = [
        (
            *([curve_name(curve)] if len(curves) > 1 else []),
            cell(point.gpus, "whole"),
            cell(point.global_batch, "whole"),
            cell(point.priced.estimate.step_seconds.expected, "seconds"),
            band_words(point.priced.estimate.step_seconds),
            cell(point.priced.estimate.tokens_per_second, "whole"),
            cell(point.priced.estimate.mfu_fraction, "fraction"),
            _kept(curve, point),
            degrees(point.priced.case.layout),
        )
        for curve in curves
        for point in curve.points
        if point.priced is not None
    ]
    columns = ("GPUs", "batch", "step", "80 % band", "tokens/s", "MFU", "kept", "layout")
    return Table(
        caption="The best layout on each number of GPUs",
        columns=(("machine", *columns) if len(curves) > 1 else columns),
        rows=tuple(rows),
        folded=len(rows) > 10,
    )


def _kept(curve: Curve, point: Point) -> Cell:
    share, error = curve.efficiency(point), curve.efficiency_error(point)
    if share is None:
        return Cell("")
    give = f" ± {100 * error * share:.0f}" if error else ""
    return Cell(f"{100 * share:.0f} %{give}{', knee' if curve.is_knee(point) else ''}", share)


def _misses(curves: Sequence[Curve]) -> list[Note]:
    return [
        Note(
            text=point.problem,
            title=f"Nothing on {point.gpus:,} GPUs"
            f"{f' ({curve_name(curve)})' if len(curves) > 1 else ''}:",
        )
        for curve in curves
        for point in curve.points
        if point.priced is None
    ]
