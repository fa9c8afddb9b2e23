"""Buildable: the planner and the trainer agree on which models the reference decoder can be."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.estimate import trainer_builds
from fsdpplan.files.catalogue import load_model, model_names
from fsdpplan.spec.model import Model
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.support import require_runnable
from tests.strategies import any_models, models
from tests.trainer import plans


def is_refused(model: Model, seq_len: int) -> bool:
    text = plans.plan_text(training={"seq_len": seq_len})
    document = json.loads(text) | {"model": asdict(model)}
    try:
        require_runnable(parse_plan(json.dumps(document)))
    except TrainerError:
        return True
    return False


@given(any_models() | models(), st.sampled_from([32, 64, 128]))
def test_the_trainer_refuses_just_what_the_planner_marks(model: Model, seq_len: int) -> None:
    assert trainer_builds(model=model, seq_len=seq_len) is not is_refused(model, seq_len)


@pytest.mark.parametrize("name", model_names())
def test_catalogue_models_are_refused_if_and_only_if_they_are_marked(name: str) -> None:
    model = load_model(name)
    for seq_len in (1024, 8192):
        if model.positions == "learned" and seq_len > model.max_positions:
            continue  # no layout at all is legal
        assert trainer_builds(model=model, seq_len=seq_len) is not is_refused(model, seq_len)
