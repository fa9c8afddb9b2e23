"""Curves over numbers of GPUs: as tables with a chart in plain text, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdpplan.cli.views.difference import priced_document
from fsdpplan.cli.views.render import aligned, blocks, listed, table, wrapped
from fsdpplan.files.plans import SCHEMA_VERSION, model_document, training_document
from fsdpplan.search.advice.difference import Priced
from fsdpplan.search.advice.words import degrees
from fsdpplan.search.scaling import KNEE_FRACTION, Knee, Rate, efficiency, knee
from fsdpplan.spec.layout import MESH_AXES
from fsdpplan.spec.model import Model
from fsdpplan.units import format_count, format_percent, format_seconds

LEAST_BAR = 10
"""Columns of a whole bar."""


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

    def efficiency(self, point: Point) -> float | None:
        """Of a point, against the smallest that fits."""
        return None if point.rate is None else efficiency(self.rates[0], point.rate)


def sweep_screen(
    model: Model, curves: Sequence[Curve], assumed: Sequence[str], *, width: int
) -> str:
    """What `sweep` prints."""
    return blocks(
        *(_curve(model, curve, width) for curve in curves),
        listed("Assumed", assumed, width=width),
    )


def _curve(model: Model, curve: Curve, width: int) -> str:
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
    headers = ["GPUs", *grows, "step", "tokens/s", "MFU"]
    rows = []
    for point in fitting:
        assert point.priced is not None
        estimate, tokens = point.priced.estimate, point.priced.case.training.tokens
        row = [
            f"{point.gpus:,}",
            *(f"{point.global_batch:,}" for _ in grows),
            format_seconds(estimate.step_seconds.expected),
            f"{estimate.tokens_per_second:,.0f}",
            format_percent(estimate.mfu_fraction),
        ]
        if tokens is not None:
            headers[4 + len(grows) :] = [f"for {format_count(tokens)}", "GPU hours"]
            row.append(format_seconds(point.priced.seconds_for(tokens)))
            row.append(f"{point.priced.gpu_seconds_for(tokens) / 3600:,.0f}")
        rows.append(row)
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
    )


def _chart(curve: Curve, fitting: Sequence[Point], width: int) -> str:
    """A bar of the efficiency of each point; the knee is marked."""
    shares = [(point, curve.efficiency(point) or 0.0) for point in fitting]
    bar = max(LEAST_BAR, width - 32)
    whole = max(1.0, *(share for _, share in shares))
    rows = [
        (
            f"{point.gpus:,}",
            "#" * max(1, round(bar * share / whole)),
            f"{100 * share:.0f} %{' knee' if curve.is_knee(point) else ''}",
        )
        for point, share in shares
    ]
    heading = wrapped(f"Tokens a second and GPU, against {fitting[0].gpus:,} GPUs", width=width)
    return f"{heading}\n{aligned(rows, align=('right', 'left', 'left'))}"


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


def sweep_csv(curves: Sequence[Curve]) -> str:
    """What `sweep --csv` prints: a row a point."""
    rows = [_row(curve, point) for curve in curves for point in curve.points]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(curve: Curve, point: Point) -> dict[str, Any]:
    """A point in numbers; empty where nothing fits."""
    one = point.priced
    estimate = None if one is None else one.estimate
    layout = None if one is None else one.case.layout
    tokens = None if one is None else one.case.training.tokens
    return {
        "hardware": curve.hardware,
        "scaling": curve.scaling,
        "gpus": point.gpus,
        "global_batch": point.global_batch,
        **{axis: getattr(layout, axis, None) for axis in MESH_AXES},
        "ep": getattr(layout, "ep", None),
        "micro_batch": getattr(layout, "micro_batch", None),
        "step_seconds": estimate and estimate.step_seconds.expected,
        "step_seconds_lower": estimate and estimate.step_seconds.lower,
        "step_seconds_upper": estimate and estimate.step_seconds.upper,
        "tokens_per_second": estimate and estimate.tokens_per_second,
        "tokens_per_second_per_gpu": estimate and estimate.tokens_per_second_per_gpu,
        "efficiency_fraction": curve.efficiency(point),
        "mfu_fraction": estimate and estimate.mfu_fraction,
        "peak_device_bytes": estimate and estimate.memory.peak_device_bytes,
        "seconds_to_train": one and tokens and one.seconds_for(tokens),
        "gpu_seconds_to_train": one and tokens and one.gpu_seconds_for(tokens),
        "is_knee": curve.is_knee(point),
        "problem": point.problem,
    }


def sweep_json(model: Model, curves: Sequence[Curve]) -> str:
    """What `sweep --json` prints."""
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "model": model_document(model),
            "curves": [
                {
                    "hardware": curve.hardware,
                    "scaling": curve.scaling,
                    "knee": None if curve.knee is None else asdict(curve.knee),
                    "points": [_point(curve, point) for point in curve.points],
                }
                for curve in curves
            ],
        },
        indent=2,
        allow_nan=False,
    )


def _point(curve: Curve, point: Point) -> dict[str, Any]:
    one = point.priced
    priced = {"layout": None, "estimate": None} if one is None else priced_document(one)
    return {
        "gpus": point.gpus,
        "global_batch": point.global_batch,
        "training": None if one is None else training_document(one.case.training),
        **priced,
        "efficiency_fraction": curve.efficiency(point),
        "problem": point.problem or None,
    }
