"""Curves side by side: machines against the first of them with what can be told apart, and all
points as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fsdpplan.cli.views.difference import difference_document, priced_document
from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.cli.views.scaling import amount_words, curve_screen
from fsdpplan.files.plans import SCHEMA_VERSION, model_document, training_document
from fsdpplan.search.advice.difference import Difference
from fsdpplan.search.scaling import Curve, Point, pairs
from fsdpplan.spec.layout import MESH_AXES
from fsdpplan.spec.model import Model
from fsdpplan.units import BILLION, format_count, format_seconds

LETTERS = "ABCDEFGHIJKLMNOP"


def sweep_screen(
    model: Model, curves: Sequence[Curve], assumed: Sequence[str], *, width: int
) -> str:
    """What `sweep` prints."""
    return blocks(
        *(curve_screen(model, curve, width=width) for curve in curves),
        *(_beside(curves, scaling, width) for scaling in ("strong", "weak")),
        listed("Assumed", assumed, width=width),
    )


def _beside(curves: Sequence[Curve], scaling: str, width: int) -> str:
    """The machines of one kind of curve, by the number of GPUs."""
    own = [curve for curve in curves if curve.scaling == scaling]
    if len(own) < 2:
        return ""
    asked = {
        one.priced.case.training.tokens for curve in own for one in curve.points if one.priced
    } - {None}
    tokens = next(iter(asked), None) or BILLION
    letters = {curve.hardware: letter for curve, letter in zip(own, LETTERS, strict=False)}
    has_price = any(curve.price_per_gpu_hour is not None for curve in own)
    found = sorted(
        (one for one in pairs(own) if one[1].priced is not None), key=lambda one: one[1].gpus
    )
    rows = []
    for curve, point, against in found:
        assert point.priced is not None
        rows.append(
            [
                f"{point.gpus:,}",
                letters[curve.hardware],
                format_seconds(point.priced.seconds_for(tokens)),
                amount_words(point.priced.gpu_hours_for(tokens)),
                *(amount_words(curve.price(point, tokens)) for _ in range(has_price)),
                *_against(against),
            ]
        )
    if not rows:
        return ""
    headers = ["GPUs", "", f"{format_count(tokens)} tokens", "GPU hours"]
    headers += ["price"] * has_price + ["tokens/s over A (80 %)", "told apart"]
    align = ["right", "left", *["right"] * (len(headers) - 4), "left", "left"]
    names = "; ".join(f"{letter} {name}" for name, letter in letters.items())
    return blocks(
        wrapped(f"Side by side, {scaling} scaling: {names}", width=width),
        table(rows, headers=headers, align=align, width=width),
    )


def _against(found: Difference | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    lower, upper = found.ratio_band
    return f"{1 / found.ratio:.2f} ({1 / upper:.2f} to {1 / lower:.2f})", (
        "yes" if found.told_apart else "no"
    )


def sweep_csv(curves: Sequence[Curve]) -> str:
    """What `sweep --csv` prints: a row a point."""
    rows = [_row(*one) for one in pairs(curves)]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(curve: Curve, point: Point, against: Difference | None) -> dict[str, Any]:
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
        "efficiency_error_fraction": curve.efficiency_error(point),
        "mfu_fraction": estimate and estimate.mfu_fraction,
        "peak_device_bytes": estimate and estimate.memory.peak_device_bytes,
        "seconds_to_train": one and tokens and one.seconds_for(tokens),
        "gpu_seconds_to_train": one and tokens and one.gpu_seconds_for(tokens),
        "price_per_gpu_hour": curve.price_per_gpu_hour,
        "price_to_train": tokens and curve.price(point, tokens),
        "tokens_per_second_over_first": against and 1 / against.ratio,
        "over_first_error_fraction": against and against.error_fraction,
        "over_first_told_apart": against and against.told_apart,
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
                    "price_per_gpu_hour": curve.price_per_gpu_hour,
                    "knee": None if curve.knee is None else asdict(curve.knee),
                    "points": [_point(*one) for one in pairs(curves) if one[0] is curve],
                }
                for curve in curves
            ],
        },
        indent=2,
        allow_nan=False,
    )


def _point(curve: Curve, point: Point, against: Difference | None) -> dict[str, Any]:
    one = point.priced
    tokens = None if one is None else one.case.training.tokens
    priced = {"layout": None, "estimate": None} if one is None else priced_document(one)
    return {
        "gpus": point.gpus,
        "global_batch": point.global_batch,
        "training": None if one is None else training_document(one.case.training),
        **priced,
        "efficiency_fraction": curve.efficiency(point),
        "efficiency_error_fraction": curve.efficiency_error(point),
        "price_to_train": None if tokens is None else curve.price(point, tokens),
        "over_first": None if against is None else difference_document(against),
        "problem": point.problem or None,
    }
