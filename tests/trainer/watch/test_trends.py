"""Stragglers and drift."""

from __future__ import annotations

from fsdpplan.trainer.watch.trends import DRIFT_STEPS, STRAGGLER_STEPS, DriftWatch, StragglerWatch


def fed(watch: StragglerWatch, step: list[float], times: int) -> list[int]:
    return [found.rank for _ in range(times) for found in watch.ended(step)]


def test_a_slow_rank_is_named_once() -> None:
    watch = StragglerWatch([range(4)])
    assert fed(watch, [1.0, 1.0, 1.5, 1.0], 3 * STRAGGLER_STEPS) == [2]


def test_of_two_ranks_the_slow_one_is_named() -> None:
    assert fed(StragglerWatch([range(2)]), [3.0, 1.0], STRAGGLER_STEPS) == [0]


def test_noise_names_nobody() -> None:
    watch = StragglerWatch([range(3)])
    for step in range(100):
        noisy = [1.0, 1.1, 0.95]
        noisy[step % 3] = 5.0
        assert watch.ended(noisy) == []


def test_a_rank_is_held_against_its_own_stage_only() -> None:
    watch = StragglerWatch([[0, 1], [2, 3], [4]])
    assert fed(watch, [1.0, 1.0, 4.0, 4.0, 9.0], 2 * STRAGGLER_STEPS) == []


def test_ranks_without_time_of_their_own_are_no_stragglers() -> None:
    assert fed(StragglerWatch([range(2)]), [0.0, 0.0], 2 * STRAGGLER_STEPS) == []


def said(steps: list[float]) -> list[tuple[float, float]]:
    watch = DriftWatch()
    found = [watch.ended(seconds) for seconds in steps]
    return [(one.first_seconds, one.last_seconds) for one in found if one is not None]


def test_steps_that_grow_longer_are_said_once() -> None:
    assert said([1.0] * DRIFT_STEPS + [1.3] * 4 * DRIFT_STEPS) == [(1.0, 1.3)]


def test_a_few_long_steps_are_no_drift() -> None:
    assert said(([1.0] * 9 + [20.0]) * DRIFT_STEPS) == []


def test_steady_steps_are_no_drift() -> None:
    assert said([1.0, 1.05] * 4 * DRIFT_STEPS) == []
