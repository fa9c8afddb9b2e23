"""Rows with made-up predictions, to test what is made of them without the cost model."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.spec.plan import Interval
from fsdpplan.validate.compare.compared import ComparedRun, compare
from fsdpplan.validate.compare.predict import Prediction
from tests.validate.tables import run


def made(
    measured: float,
    predicted: float,
    *,
    half_width: float = 0.2,
    micro_batch: int = 1,
    fits: bool = True,
    **columns: str,
) -> ComparedRun:
    """A row that took `measured` seconds where `predicted` were expected."""
    batch = {"micro_batch": str(micro_batch), "global_batch": "1024"}
    row = compare(run(**(batch | {"step_time_s": str(measured)} | columns)))
    assert isinstance(row.outcome, Prediction)
    band = Interval(
        lower=predicted * (1 - half_width),
        expected=predicted,
        upper=predicted * (1 + half_width),
    )
    return replace(row, outcome=replace(row.outcome, step_seconds=band, fits=fits))
