"""The learning rate: what torch's and transformers' schedules say, and what holds for all."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.trainer_options import FINAL_FRACTION
from fsdpplan.trainer.optimizer import Recipe
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.schedule import (
    SCHEDULES,
    Schedule,
    learning_rate_at,
    schedule_of,
)

PEAK = 3e-4
TOLERANCE = 1e-12
"""Of the peak."""

COSINE = Schedule(
    kind="cosine", steps=100, learning_rate=PEAK, min_lr=3e-5, warmup_steps=10, decay_steps=20
)

ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("cosine_with_min_lr", {"min_lr": 3e-5}),
    "linear": ("polynomial", {"lr_end": 3e-5, "power": 1.0}),
    "wsd": (
        "warmup_stable_decay",
        {"num_decay_steps": 20, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
    ),
    "constant": ("constant_with_warmup", {}),
}
"""Ours -> transformers' name, and what it takes."""


def theirs(name: str, steps: int, warmup: int, **specific: Any) -> list[float]:
    """The rates that transformers' scheduler gives the steps, from 0."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=specific,
    )
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_is_transformers(kind: str, warmup: int) -> None:
    name, specific = ARGUMENTS[kind]
    expected = theirs(name, 100, warmup, **specific)
    schedule = replace(COSINE, kind=kind, warmup_steps=warmup)
    found = [learning_rate_at(step, schedule) for step in range(100)]
    assert found[warmup:] == pytest.approx(expected[warmup:], abs=TOLERANCE * PEAK, rel=0)
    if kind != "wsd" and warmup:  # whose warm-up begins at the floor
        # its first step has no rate, and so changes nothing
        assert found[: warmup - 1] == pytest.approx(expected[1:warmup], rel=TOLERANCE)
        assert expected[0] == 0 < found[0]


def test_a_cosine_to_zero_is_torchs() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.0)
    schedule = replace(COSINE, steps=50, warmup_steps=0, min_lr=0.0)
    for step in range(50):
        rate = optimizer.param_groups[0]["lr"]
        assert learning_rate_at(step, schedule) == pytest.approx(rate, abs=TOLERANCE * PEAK)
        optimizer.step()
        scheduler.step()


def test_rates_by_hand() -> None:
    assert learning_rate_at(4, COSINE) == pytest.approx(PEAK / 2, rel=TOLERANCE)
    assert learning_rate_at(55, COSINE) == pytest.approx((PEAK + 3e-5) / 2, rel=TOLERANCE)
    linear = replace(COSINE, kind="linear")
    assert learning_rate_at(40, linear) == pytest.approx(3e-5 + 2.7e-4 * 2 / 3, rel=TOLERANCE)
    wsd = replace(COSINE, kind="wsd")
    assert learning_rate_at(79, wsd) == learning_rate_at(80, wsd) == PEAK
    assert learning_rate_at(85, wsd) == pytest.approx(3e-5 + 2.7e-4 * 0.5, rel=TOLERANCE)


schedules = st.builds(
    lambda kind, steps, warmup, decay, floor: Schedule(
        kind=kind,
        steps=steps,
        learning_rate=PEAK,
        min_lr=PEAK * floor,
        warmup_steps=min(warmup, steps - 1),
        decay_steps=max(1, min(decay, steps - min(warmup, steps - 1))),
    ),
    st.sampled_from(SCHEDULES),
    st.integers(1, 5000),
    st.integers(0, 3000),
    st.integers(1, 3000),
    st.sampled_from([0.0, 0.1, 1.0]),
)


@given(schedules)
def test_the_rate_rises_then_falls_and_keeps_its_bounds(schedule: Schedule) -> None:
    few = sorted({*range(0, schedule.steps, max(1, schedule.steps // 60)), schedule.warmup_steps})
    rates = [learning_rate_at(step, schedule) for step in few]
    assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in rates)
    top = few.index(schedule.warmup_steps)
    assert rates[top] == pytest.approx(PEAK)
    rounding = 1 + 1e-12
    assert all(one <= other * rounding for one, other in pairwise(rates[: top + 1]))
    assert all(other <= one * rounding for one, other in pairwise(rates[top:]))
    end = learning_rate_at(schedule.steps, schedule)
    lowest = PEAK if schedule.kind == "constant" else schedule.min_lr
    assert end == pytest.approx(lowest, abs=1e-18)
    assert learning_rate_at(schedule.steps + 7, schedule) == end


@given(schedules)
def test_no_step_jumps_where_the_floor_is_the_peak(schedule: Schedule) -> None:
    flat = replace(schedule, min_lr=PEAK, warmup_steps=0)
    assert learning_rate_at(schedule.steps // 2, flat) == pytest.approx(PEAK)


def test_what_is_not_told_follows_from_the_steps() -> None:
    options = parse_options(["--steps", "30000", "--learning-rate", "1e-3"])
    assert (options.warmup_steps, options.decay_steps) == (2000, 3000)
    recipe = Recipe(steps=50, learning_rate=1e-3, warmup_steps=5, weight_decay=0, clip_norm=1)
    assert recipe.schedule.min_lr == pytest.approx(1e-3 * FINAL_FRACTION)
    assert recipe.schedule.decay_steps == 5
    assert math.isclose(learning_rate_at(50, recipe.schedule), 1e-4)


def test_what_older_checkpoints_say_was_a_cosine_to_a_tenth() -> None:
    found = schedule_of({"steps": 100, "learning_rate": PEAK, "warmup_steps": 10})
    assert learning_rate_at(55, found) == pytest.approx(learning_rate_at(55, COSINE))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr-schedule constant --min-lr 1e-5", "leave it out with --lr-schedule constant"),
        ("--learning-rate 1e-4 --min-lr 1e-3", "above the peak"),
        ("--decay-steps 3", "is of --lr-schedule wsd"),
        ("--lr-schedule wsd --steps 10 --warmup-steps 6 --decay-steps 5", "more than --steps 10"),
        ("--lr-schedule wsd --steps 10 --warmup-steps 10", "more than --steps 10"),
        ("--lr-schedule step", "invalid choice"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(words.split())
    assert said in capsys.readouterr().err
