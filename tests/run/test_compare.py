from __future__ import annotations

import pytest

from fsdpplan.run.compare import compare
from fsdpplan.run.follow.metric_events import Step, Summary
from fsdpplan.run.follow.metrics import Measured
from tests.emit.plans import make_estimate

ESTIMATE = make_estimate(tokens=1000, gpus=4, seconds=0.2)


def summary(**values: object) -> Summary:
    names = Summary.__slots__
    return Summary(**{**dict.fromkeys(names), **values})  # type: ignore[arg-type]


def step(number: int, **values: object) -> Step:
    return Step(**{**dict.fromkeys(Step.__slots__), "step": number, **values})  # type: ignore[arg-type]


def test_a_run_inside_the_band() -> None:
    measured = Measured(
        summary=summary(step_seconds=0.25, tokens_per_second=4000.0, mfu_fraction=0.16)
    )
    time, tokens, mfu, allocated, _ = compare(estimate=ESTIMATE, measured=measured)
    assert time.error_fraction == pytest.approx(-0.2)
    assert tokens.error_fraction == pytest.approx(0.25)
    assert (time.inside_band, tokens.inside_band, mfu.inside_band) == (True, True, True)
    assert allocated.measured is None
    assert allocated.error_fraction is None
    assert allocated.inside_band is None


def test_rates_leave_their_band_when_the_step_does() -> None:
    for seconds, inside in ((0.11, True), (0.39, True), (0.09, False), (0.41, False)):
        measured = Measured(summary=summary(step_seconds=seconds, tokens_per_second=1000 / seconds))
        time, tokens, *_ = compare(estimate=ESTIMATE, measured=measured)
        assert (time.inside_band, tokens.inside_band) == (inside, inside)


def test_without_a_summary_the_steps_speak() -> None:
    steps = tuple(step(n, step_seconds=0.1 * n, allocated_bytes=n * 10**6) for n in range(1, 4))
    time, _, _, allocated, reserved = compare(estimate=ESTIMATE, measured=Measured(steps=steps))
    assert time.measured == pytest.approx(0.25)
    assert allocated.measured == 3 * 10**6
    assert reserved.measured is None


def test_resident_memory_is_not_passed_off_as_the_allocators() -> None:
    measured = Measured(summary=summary(peak_allocated_bytes=5, memory_kind="resident"))
    *rates, allocated = compare(estimate=ESTIMATE, measured=measured)
    assert allocated.quantity == "peak_allocated_bytes"
    assert allocated.note is not None
    assert len(rates) == 3
    measured = Measured(summary=summary(peak_allocated_bytes=5, memory_kind="allocator"))
    assert all(row.note is None for row in compare(estimate=ESTIMATE, measured=measured))
