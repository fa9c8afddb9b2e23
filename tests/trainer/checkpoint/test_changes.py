"""What a resumed run does otherwise is said, and refused where the learning rate would jump."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.trainer.checkpoint.progress import (
    JUMP_FRACTION,
    Progress,
    changes,
    recorded,
    require_same_run,
    written_by,
)
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.groups import parse_group
from fsdpplan.trainer.optimizer import Recipe
from fsdpplan.trainer.schedule import SCHEDULES, learning_rate_at
from tests.trainer import plans

PLAN = parse_plan(plans.plan_text())
PATH = Path("saved/step-00000050")
RECIPE = Recipe(steps=100, learning_rate=1e-3, warmup_steps=10, weight_decay=0.1, clip_norm=1.0)


def found(recipe: Recipe, *, step: int = 50, told: bool = True) -> Progress:
    """A checkpoint of a run with this recipe; `told`: it says all of it."""
    return Progress(
        step=step,
        sequences=0,
        seed=0,
        seq_len=PLAN.training.seq_len,
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup_steps,
        recipe=recorded(recipe) if told else {},
    )


def said(before: Recipe, now: Recipe, *, allowed: bool = False, **at: Any) -> str:
    return "; ".join(changes(PATH, found(before, **at), PLAN, now, allowed=allowed))


@pytest.mark.parametrize("told", [True, False])
def test_the_same_recipe_is_nothing_to_speak_of(told: bool) -> None:
    assert said(RECIPE, RECIPE, told=told) == ""


@pytest.mark.parametrize("told", [True, False])
def test_more_steps_under_a_cosine_are_refused(told: bool) -> None:
    longer = replace(RECIPE, steps=200)
    with pytest.raises(TrainerError, match="--allow-changes to go on like this") as refused:
        said(RECIPE, longer, told=told)
    old, new = (learning_rate_at(50, recipe.schedule) for recipe in (RECIPE, longer))
    assert "steps 100 there, 200 from here on" in str(refused.value)
    assert f"of step 51 is {new:.4g}, by the old schedule {old:.4g}" in str(refused.value)
    assert f"of step 51 is {new:.4g}" in said(RECIPE, longer, told=told, allowed=True)


@pytest.mark.parametrize(
    "now",
    [
        {"learning_rate": 5e-4},
        {"lr_schedule": "linear", "min_lr": 0.0},
        {"lr_schedule": "constant"},
        {"warmup_steps": 70},
        {"steps": 60},
    ],
)
def test_what_makes_the_rate_jump_is_refused(now: dict[str, Any]) -> None:
    with pytest.raises(TrainerError, match="learning rate of step 51 is"):
        said(RECIPE, replace(RECIPE, **now))


def test_more_steps_before_wsd_decays_are_only_said() -> None:
    wsd = replace(RECIPE, lr_schedule="wsd", decay_steps=20)
    assert said(wsd, replace(wsd, steps=500)) == "steps 100 there, 500 from here on"
    with pytest.raises(TrainerError, match="by the old schedule"):
        said(wsd, replace(wsd, steps=500), step=90)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"weight_decay": 0.2}, "weight_decay 0.1 there, 0.2 from here on"),
        ({"betas": (0.9, 0.99)}, "betas 0.9 0.95 there, 0.9 0.99 from here on"),
        ({"clip_norm": float("inf")}, "clip_norm 1 there, none from here on"),
        ({"eps": 1e-6}, "eps 1e-08 there, 1e-06 from here on"),
        ({"expert_bias_rate": 0.001}, "expert_bias_rate 0 there, 0.001 from here on"),
        ({"router_aux_loss_coef": 0.02}, "router_aux_loss_coef 0 there, 0.02 from here on"),
        (
            {"groups": (parse_group("*:lr=2"),)},
            "groups none there, *:lr=2 from here on",
        ),
    ],
)
def test_what_leaves_the_rate_is_said(now: dict[str, Any], words: str) -> None:
    assert said(RECIPE, replace(RECIPE, **now)) == words


def test_muons_rate_counts_too() -> None:
    muon = replace(RECIPE, optimizer="muon", muon_learning_rate=0.02)
    with pytest.raises(TrainerError, match="that of Muon's matrices of step 51"):
        said(muon, replace(muon, muon_learning_rate=0.04))
    assert "muon_momentum 0.95 there, 0.9 from" in said(muon, replace(muon, muon_momentum=0.9))


def test_a_run_at_its_end_has_no_rate_that_jumps() -> None:
    assert "steps 100 there, 50 from here on" in said(RECIPE, replace(RECIPE, steps=50))


def test_another_batch_is_said() -> None:
    layout = {"dp_replicate": 1, "dp_shard": 3, "micro_batch": 7, "num_microbatches": 1}
    there = replace(found(RECIPE), layout=layout)
    (words,) = changes(PATH, there, PLAN, RECIPE, allowed=False)
    assert words.startswith(f"global_batch 21 there, {PLAN.training.global_batch} from here on")


@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from(SCHEDULES),
    st.integers(11, 400),
    st.integers(0, 30),
    st.integers(0, 99),
)
def test_it_is_refused_if_and_only_if_the_next_rate_jumps(
    old: str, new: str, steps: int, warmup: int, step: int
) -> None:
    before = replace(RECIPE, lr_schedule=old)
    now = replace(RECIPE, lr_schedule=new, steps=steps, warmup_steps=warmup)
    rates = [learning_rate_at(step, recipe.schedule) for recipe in (before, now)]
    jumps = abs(rates[0] - rates[1]) > JUMP_FRACTION * max(rates) and step < steps
    try:
        said(before, now, step=step)
    except TrainerError:
        assert jumps
    else:
        assert not jumps


def test_every_setting_is_recorded() -> None:
    muon = recorded(replace(RECIPE, optimizer="muon"))
    assert muon.keys() == {each.name for each in fields(Recipe)}


def test_another_dropout_and_lost_errors_of_powersgd_are_said() -> None:
    before = replace(found(RECIPE), **written_by(PLAN))
    assert require_same_run(PATH, before, PLAN, seed=0) == []
    changed = {"dropout": {"residual": 0.1}, "gradient_compression": "powersgd:1:20"}
    now = parse_plan(plans.plan_text(training=changed))
    powersgd, dropout = require_same_run(PATH, before, now, seed=0)
    assert dropout == "dropout of residual 0 there, 0.1 from here on"
    assert "the next 20 steps are sent whole" in powersgd
