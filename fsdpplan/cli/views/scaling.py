"""Curves over numbers of GPUs: as tables, as CSV, as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.search.advice.words import degrees
from fsdpplan.search.scaling import Curve, Point, knee_words
from fsdpplan.spec.model import Model
from fsdpplan.units import BILLION, format_count, format_percent, format_seconds


def curve_screen(model: Model, curve: Curve, *, width: int) -> str:
    """One curve: its points and its knee."""
    fitting = [point for point in curve.points if point.priced is not None]
    batches = [one.global_batch for one in curve.points if one.global_batch is not None]
    kept = "the batch of a GPU stays"
    if curve.scaling == "strong":
        kept = f"{batches[0]:,} sequences a step" if batches else "the global batch stays"
    heading = f"{model.name} on {curve.hardware}, {curve.scaling} scaling ({kept})"
    return blocks(
        wrapped(heading, width=width),
        _table(curve, fitting, width) if fitting else "",
        wrapped(knee_words(curve), width=width) if len(fitting) > 1 else "",
        listed(
            "Nothing fits on",
            (f"{one.gpus:,} GPUs: {one.problem}" for one in curve.points if one.priced is None),
            width=width,
        ),
    )


def _table(curve: Curve, fitting: Sequence[Point], width: int) -> str:
    grows = ["batch"] if curve.scaling == "weak" else []
    headers = ["GPUs", *grows, "step", "80 %", "tokens/s", "MFU", "efficiency"]
    rows = []
    for point in fitting:
        assert point.priced is not None
        estimate = point.priced.estimate
        step = estimate.step_seconds
        rows.append(
            [
                f"{point.gpus:,}",
                *(f"{point.global_batch:,}" for _ in grows),
                format_seconds(step.expected),
                f"+-{format_percent(step.upper / step.expected - 1)}",
                f"{estimate.tokens_per_second:,.0f}",
                format_percent(estimate.mfu_fraction),
                _efficiency(curve, point),
            ]
        )
    return blocks(
        table(rows, headers=headers, align=["right"] * (len(headers) - 1) + ["left"], width=width),
        "\n".join(
            wrapped(
                degrees(point.priced.case.layout),
                width=width,
                first=f"  {point.gpus:>6,} GPUs  ",
            )
            for point in fitting
            if point.priced is not None
        ),
        _training(curve, fitting, width),
    )


def _training(curve: Curve, fitting: Sequence[Point], width: int) -> str:
    """What a whole training takes, with its band; of a billion tokens where only a price is
    known."""
    (asked,) = {point.priced.case.training.tokens for point in fitting if point.priced}
    priced = curve.price_per_gpu_hour is not None
    if asked is None and not priced:
        return ""
    tokens = asked or BILLION
    rows = []
    for point in fitting:
        assert point.priced is not None
        step, seconds = point.priced.estimate.step_seconds, point.priced.seconds_for(tokens)
        ends = [seconds * end / step.expected for end in (step.lower, step.upper)]
        lower, upper = (format_seconds(end, beside=seconds) for end in ends)
        rows.append(
            [
                f"{point.gpus:,}",
                format_seconds(seconds),
                f"{lower.split()[0]} to {upper}",
                amount_words(point.priced.gpu_hours_for(tokens)),
                *(amount_words(curve.price(point, tokens)) for _ in range(priced)),
            ]
        )
    headers = ["GPUs", f"{format_count(tokens)} tokens", "80 % band", "GPU hours"]
    headers += ["price"] * priced
    return table(rows, headers=headers, align=["right"] * len(headers), width=width)


def amount_words(amount: float | None) -> str:
    """GPU hours, or a price in the currency of `--price`."""
    if amount is None:
        return ""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}"


def _efficiency(curve: Curve, point: Point) -> str:
    """Tokens a second and GPU over those of the first point; the knee is marked."""
    knee = " knee" if curve.is_knee(point) else ""
    share = f"{100 * (curve.efficiency(point) or 0.0):.0f} %"
    return f"{share}{_give_or_take(curve, point)}{knee}"


def _give_or_take(curve: Curve, point: Point) -> str:
    error = curve.efficiency_error(point)
    return f" +-{100 * error * (curve.efficiency(point) or 0):.0f}" if error else ""
