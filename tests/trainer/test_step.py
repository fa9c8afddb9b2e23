"""The learning rate and the loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.optimizer import Recipe
from fsdpplan.trainer.step import (
    FINAL_LEARNING_RATE_FRACTION,
    learning_rate_at,
    loss_function,
)
from tests.trainer.plans import plan_text


def recipe(*, steps: int, warmup_steps: int) -> Recipe:
    return Recipe(
        steps=steps,
        learning_rate=1e-3,
        warmup_steps=warmup_steps,
        weight_decay=0.1,
        clip_norm=1.0,
    )


@given(steps=st.integers(1, 10_000), warmup=st.integers(0, 3000))
def test_the_learning_rate_rises_then_falls_and_keeps_its_bounds(steps: int, warmup: int) -> None:
    chosen = recipe(steps=steps, warmup_steps=warmup)
    rates = [learning_rate_at(step, chosen) for step in range(0, steps, max(1, steps // 50))]
    assert all(0 < rate <= 1e-3 * (1 + 1e-12) for rate in rates)
    if warmup < steps:
        assert learning_rate_at(warmup, chosen) == pytest.approx(1e-3)
        after = [learning_rate_at(step, chosen) for step in range(warmup, steps, 7)]
        assert after == sorted(after, reverse=True)


def test_the_learning_rate_ends_at_a_tenth() -> None:
    chosen = recipe(steps=100, warmup_steps=10)
    assert learning_rate_at(100, chosen) == pytest.approx(1e-3 * FINAL_LEARNING_RATE_FRACTION)
    assert learning_rate_at(0, chosen) == pytest.approx(1e-4)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch._dynamo's own
def test_the_loss_is_compiled_where_the_blocks_are() -> None:
    """A device needs no driver to be named."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    compiled, eager = (parse_plan(plan_text(compile=compiled)) for compiled in (True, False))
    assert loss_function(compiled, gpu, None) is not next_token_loss
    assert loss_function(compiled, gpu, None) is loss_function(compiled, gpu, None)
    assert loss_function(compiled, cpu, None) is next_token_loss
    assert loss_function(eager, gpu, None) is next_token_loss
