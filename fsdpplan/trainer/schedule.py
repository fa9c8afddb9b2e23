"""Learning-rate schedules: one pure function from the number of a step to its rate.

All rise linearly over the warm-up, whose last step has the peak, and end at a floor (that of
`constant` is the peak): a rate, as Megatron-LM's `--min-lr` is; a tenth of the peak where none is
told, as the cosine of most language models (Haegele et al., figure 2).

    cosine      low + (peak - low) (1 + cos(pi p)) / 2      p: share of the steps after the warm-up
    linear      low + (peak - low) (1 - p)
    wsd         peak; in the last steps low + (peak - low) (1 - sqrt(p)), p: share of those
    constant    peak

Source: transformers 5.23 optimization.py (`get_cosine_with_min_lr_schedule_with_warmup`,
`get_linear_schedule_with_warmup`, `get_wsd_schedule`, `get_constant_schedule_with_warmup`), whose
warm-up is one step behind: its first step has a rate of 0, and changes nothing. The decay of `wsd`
is that of Haegele et al. 2024 (arXiv 2405.18392), who found it better than a linear one;
Megatron-LM has it as `minus_sqrt`, torchtitan as `sqrt`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from .shared import trainer_options

SCHEDULES: tuple[str, ...] = get_args(trainer_options.LrSchedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the learning rate goes over a training."""

    kind: str
    """One of SCHEDULES."""
    steps: int
    learning_rate: float
    """At its peak."""
    min_lr: float
    """At the end; idle with `constant`."""
    warmup_steps: int
    decay_steps: int
    """Last steps in which `wsd` decays; idle with the others."""


def learning_rate_at(step: int, schedule: Schedule) -> float:
    """Learning rate of the `step`-th step, from 0."""
    peak, low = schedule.learning_rate, schedule.min_lr
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    return low + (peak - low) * _left(step, schedule)


def _left(step: int, schedule: Schedule) -> float:
    """Share of the way from the floor to the peak that is left, after the warm-up."""
    if schedule.kind == "wsd":
        began = schedule.steps - schedule.decay_steps
        return 1 - math.sqrt(_share(step - began, schedule.decay_steps))
    share = _share(step - schedule.warmup_steps, schedule.steps - schedule.warmup_steps)
    if schedule.kind == "linear":
        return 1 - share
    assert schedule.kind == "cosine"
    return 0.5 * (1 + math.cos(math.pi * share))


def _share(done: int, steps: int) -> float:
    return min(1.0, max(0, done) / max(1, steps))


def schedule_of(recorded: dict[str, Any]) -> Schedule:
    """The schedule of what a checkpoint says; older ones say its first three numbers only, and
    were trained with the cosine."""
    peak, low = recorded["learning_rate"], recorded.get("min_lr")
    return Schedule(
        kind=recorded.get("lr_schedule", "cosine"),
        steps=recorded["steps"],
        learning_rate=peak,
        min_lr=peak * trainer_options.FINAL_FRACTION if low is None else low,
        warmup_steps=recorded["warmup_steps"],
        decay_steps=recorded.get("decay_steps")
        or trainer_options.default_decay_steps(recorded["steps"]),
    )


def contradiction(
    *,
    kind: str,
    steps: int,
    learning_rate: float,
    min_lr: float | None,
    warmup_steps: int,
    decay_steps: int | None,
) -> str:
    """What of a schedule does not go together, and what to do; empty where it does. None: not
    told."""
    if min_lr is not None and kind == "constant":
        return "--min-lr is where a rate ends that falls: leave it out with --lr-schedule constant"
    if min_lr is not None and min_lr > learning_rate:
        return f"--min-lr {min_lr:g} is above the peak, --learning-rate {learning_rate:g}: lower it"
    if decay_steps is not None and kind != "wsd":
        return f"--decay-steps is of --lr-schedule wsd: leave it out with {kind}"
    last = trainer_options.default_decay_steps(steps) if decay_steps is None else decay_steps
    if kind == "wsd" and warmup_steps + last > steps:
        return (
            f"{warmup_steps} steps of warm-up and {last} of decay are more than --steps {steps}: "
            "lower --warmup-steps or --decay-steps"
        )
    return ""
