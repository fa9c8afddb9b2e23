"""Curves over numbers of GPUs: as tables with a chart in plain text, as CSV, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpplan.cli.views.charts import Bar, bars
from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.search.advice.difference import Priced, difference
from fsdpplan.search.advice.words import degrees
from fsdpplan.search.scaling import KNEE_FRACTION, Knee, Rate, efficiency, knee
from fsdpplan.spec.model import Model
from fsdpplan.units import format_count, format_percent, format_seconds

BILLION = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The answer for a number of GPUs."""

    gpus: int
    global_batch: int | None
    priced: Priced | None = None
    """The best layout; None where nothing fits."""
    problem: str = ""
    """Why nothing does."""

    @property
    def rate(self) -> Rate | None:
        """What they do."""
        if self.priced is None:
            return None
        return Rate(gpus=self.gpus, tokens_per_second=self.priced.estimate.tokens_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one machine, by growing number of GPUs."""

    hardware: str
    scaling: str
    points: tuple[Point, ...]
    price_per_gpu_hour: float | None = None
    """In any currency; None: not said."""

    @property
    def rates(self) -> list[Rate]:
        """Of the points that fit."""
        return [one.rate for one in self.points if one.rate is not None]

    @property
    def knee(self) -> Knee | None:
        """Where more GPUs end to pay; None where nothing fits."""
        return knee(self.rates)

    def is_knee(self, point: Point) -> bool:
        """Whether more GPUs end to pay here, which only a later point can show."""
        found = self.knee
        return found is not None and found.next_gpus is not None and found.gpus == point.gpus

    def efficiency_error(self, point: Point) -> float | None:
        """80 % half-width of that ratio: what both points share cancels."""
        first = next((one.priced for one in self.points if one.priced is not None), None)
        if first is None or point.priced is None:
            return None
        return 0.0 if first == point.priced else difference(first, point.priced).error_fraction

    def price(self, point: Point, tokens: int) -> float | None:
        """Of so many tokens."""
        if point.priced is None or self.price_per_gpu_hour is None:
            return None
        return point.priced.gpu_seconds_for(tokens) / 3600 * self.price_per_gpu_hour

    def efficiency(self, point: Point) -> float | None:
        """Of a point, against the smallest that fits."""
        return None if point.rate is None else efficiency(self.rates[0], point.rate)


def curve_screen(model: Model, curve: Curve, *, width: int) -> str:
    """One curve: its points, its chart, its knee."""
    fitting = [point for point in curve.points if point.priced is not None]
    batches = [one.global_batch for one in curve.points if one.global_batch is not None]
    kept = "the batch of a GPU stays"
    if curve.scaling == "strong":
        kept = f"{batches[0]:,} sequences a step" if batches else "the global batch stays"
    heading = f"{model.name} on {curve.hardware}, {curve.scaling} scaling ({kept})"
    return blocks(
        wrapped(heading, width=width),
        _table(curve, fitting, width) if fitting else "",
        _chart(curve, fitting, width) if fitting else "",
        wrapped(knee_words(curve), width=width) if len(fitting) > 1 else "",
        listed(
            "Nothing fits on",
            (f"{one.gpus:,} GPUs: {one.problem}" for one in curve.points if one.priced is None),
            width=width,
        ),
    )


def _table(curve: Curve, fitting: Sequence[Point], width: int) -> str:
    grows = ["batch"] if curve.scaling == "weak" else []
    headers = ["GPUs", *grows, "step", "80 %", "tokens/s", "MFU"]
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
            ]
        )
    return blocks(
        table(rows, headers=headers, align=["right"] * len(headers), width=width),
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
                amount_words(point.priced.gpu_seconds_for(tokens) / 3600),
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


def _chart(curve: Curve, fitting: Sequence[Point], width: int) -> str:
    """A bar of the efficiency of each point; the knee is marked."""
    shares = [(point, curve.efficiency(point) or 0.0) for point in fitting]
    label = max(len(f"{point.gpus:,}") for point, _ in shares)
    rows = [
        Bar(
            name=f"{point.gpus:,}".rjust(label),
            value=share,
            words=f"{100 * share:.0f} %{_give_or_take(curve, point)}"
            f"{' knee' if curve.is_knee(point) else ''}",
        )
        for point, share in shares
    ]
    heading = wrapped(f"Tokens a second and GPU, against {fitting[0].gpus:,} GPUs", width=width)
    return f"{heading}\n{bars(rows, width=width, whole=1.0)}"


def _give_or_take(curve: Curve, point: Point) -> str:
    error = curve.efficiency_error(point)
    return f" +-{100 * error * (curve.efficiency(point) or 0):.0f}" if error else ""


def knee_words(curve: Curve) -> str:
    """Where the knee is, and what lies behind it."""
    found = curve.knee
    assert found is not None
    if found.next_gpus is None:
        return (
            f"Knee: none up to {found.gpus:,} GPUs: each doubling brings at least "
            f"{KNEE_FRACTION:.0%} of what it could."
        )
    assert found.kept_fraction is not None
    return (
        f"Knee: {found.gpus:,} GPUs, the last to which each doubling brings at least "
        f"{KNEE_FRACTION:.0%} of what it could. Towards {found.next_gpus:,} it brings "
        f"{found.kept_fraction:.0%}: a token costs {1 / found.kept_fraction - 1:.0%} more GPU "
        "hours for each doubling."
    )
