"""Curves of a run: bounded, in order, and no spike is lost."""

from __future__ import annotations

from math import inf, nan

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.run.curves import CurvePoint, curve, thinned
from fsdpplan.run.follow.metric_events import Step


@given(st.lists(st.floats(allow_nan=False), max_size=400), st.integers(min_value=4, max_value=50))
def test_a_curve_is_bounded_and_keeps_its_ends_and_its_extremes(
    values: list[float], most: int
) -> None:
    points = [CurvePoint(step, value) for step, value in enumerate(values)]
    kept = thinned(points, most=most)
    assert len(kept) <= most
    assert kept == sorted(kept, key=lambda point: point.step)
    assert set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert {min(values), max(values)} <= {point.value for point in kept}
    if len(points) <= most:
        assert kept == points


def test_what_is_no_number_is_no_point() -> None:
    losses = (5.0, None, nan, inf, 4.0)
    steps = [
        Step(
            step=number,
            loss=loss,
            step_seconds=None,
            tokens_per_second=None,
            mfu_fraction=None,
            allocated_bytes=None,
            reserved_bytes=None,
        )
        for number, loss in enumerate(losses, start=1)
    ]
    assert curve(steps, "loss") == [CurvePoint(1, 5.0), CurvePoint(5, 4.0)]
    assert curve(steps, "step_seconds") == []
