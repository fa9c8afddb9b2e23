"""What surprises less is found by slopes, and a slope is what a small step changes."""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp, log
from typing import Any

import pytest

from fsdpplan.files.learning import load_widths
from fsdpplan.spec.ledger import Widths
from fsdpplan.validate.learn.fit_widths import KEPT
from fsdpplan.validate.learn.surprise import Drawn, drawn, shuffled, surprise
from tests.validate.learn.made import made_run

WIDTHS = load_widths()
NAMES = [one.name for one in fields(Widths)]


def stack(factor: float = 1.2, **job: Any) -> Drawn:
    runs = [
        made_run(factor * (1 + 0.02 * place), **job, **layout)
        for place, layout in enumerate(
            [
                {"micro_batch": 1},
                {"micro_batch": 2},
                {"tp": 2},
                {"tp": 4, "activation_checkpointing": "full"},
                {"dp_replicate": 8},
                {"micro_batch": 4},
                {"compile": True},
                {"micro_batch": 1},
            ]
        )
    ]
    rows = [(run.features, log(run.step_seconds / run.features.seconds)) for run in runs]
    return drawn(rows, draws=4, after=(1, 3, 10), least_tests=4)


def test_a_number_of_runs_that_leaves_too_few_to_predict_is_left_out() -> None:
    assert stack().after == (1, 3)


@pytest.mark.parametrize("job", [{}, {"name": "llama-3.2-1b", "gpus": 8}], ids=["busy", "waiting"])
@pytest.mark.parametrize("name", [one for one in NAMES if one == "host" or one not in KEPT])
def test_slopes_are_what_a_small_step_changes(name: str, job: dict[str, Any]) -> None:
    rows, width, step = stack(**job), getattr(WIDTHS, name), 1e-5
    is_degrees = name == "degrees_of_freedom"
    higher, lower = (
        replace(WIDTHS, **{name: width + by if is_degrees else width * exp(by)})
        for by in (step, -step)
    )
    found = (surprise(rows, higher)[0] - surprise(rows, lower)[0]) / (2 * step)
    assert surprise(rows, WIDTHS)[1][name] == pytest.approx(found, rel=1e-4, abs=1e-7)


def test_a_stack_that_is_far_off_surprises_more() -> None:
    assert surprise(stack(2.0), WIDTHS)[0] > surprise(stack(1.0), WIDTHS)[0]


def test_the_order_of_rows_is_the_same_everywhere_and_another_in_each_draw() -> None:
    assert sorted(shuffled(20, 1)) == list(range(20))
    assert shuffled(20, 1) == shuffled(20, 1) != shuffled(20, 2)
