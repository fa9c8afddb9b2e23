"""Tensor parallelism: what it refuses, and what DDP is given of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.local_parameters import LocalParameters, hand_over_gradients
from fsdpplan.trainer.parallel.support import require_runnable
from tests.trainer import plans
from tests.trainer.parallel_layouts import MODELS, TP2


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ({}, TP2 | {"sequence_parallel": False}, "tp 2 without sequence_parallel"),
        ({"vocab": 60}, TP2 | {"tp": 4}, "tp 4 with key/value heads of 2"),
        ({"ffn_hidden": 97}, TP2, "tp 2 with feed-forward width of 97"),
        ({}, TP2 | {"async_tp": True}, "async_tp without compile"),
        ({}, {"sequence_parallel": True}, "sequence_parallel \\(it needs tensor parallelism"),
    ],
)
def test_what_cannot_be_split_is_refused_in_words(
    model: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    document = plans.plan_document(model=MODELS["llama"] | model, **layout)
    with pytest.raises(TrainerError, match=words):
        require_runnable(parse_plan(json.dumps(document)))


def test_local_parameters_call_the_model_and_hand_over_its_gradients() -> None:
    model = torch.nn.Linear(3, 2)
    wrapped = LocalParameters(model)
    x = torch.randn(4, 3)
    assert torch.equal(wrapped(x), model(x))
    wrapped(x).sum().backward()
    assert model.weight.grad is None
    hand_over_gradients([wrapped])
    assert model.weight.grad is not None
    assert all(local.grad is None for local in wrapped.parameters())
    with torch.no_grad():
        model.weight.zero_()
    assert not wrapped(x).sub(model.bias).any()
