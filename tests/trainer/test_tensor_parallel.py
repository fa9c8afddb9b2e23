"""Tensor with sequence and loss parallelism on real gloo: losses, norms and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.local_parameters import LocalParameters, hand_over_gradients
from fsdpplan.trainer.support import require_runnable
from tests.trainer import plans
from tests.trainer.parallel_layouts import MODELS, SETS, TP2, cases, measured, predicted_rows

LOSS_TOLERANCE = 5e-6
"""Sums in another order: 1e-6 was the largest difference seen in losses near 4."""
NORM_TOLERANCE = 1e-5
"""2e-7 was the largest difference seen in norms near 1, before and after one update."""


def expected(which: str, name: str) -> dict[str, list[float]]:
    """What one process loses."""
    found: dict[str, list[float]] = measured(which)[SETS[which][name][0]]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), cases("tensor_4"))
def test_a_layout_loses_as_one_process(which: str, name: str) -> None:
    found, alone = measured(which)[name], expected(which, name)
    assert found["losses"] == pytest.approx(alone["losses"][:2], abs=LOSS_TOLERANCE)
    assert found["norms"] == pytest.approx(alone["norms"][:2], abs=NORM_TOLERANCE)


@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), cases("tensor_4", precision="bf16"))
def test_bf16_begins_as_fp32_does(which: str, name: str) -> None:
    found, alone = measured(which)[name], expected(which, name)
    assert found["losses"][0] == pytest.approx(alone["losses"][0], abs=0.01)
    assert found["norms"][0] == pytest.approx(alone["norms"][0], rel=0.03)
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("which", "name"), [*cases("tensor_4"), *cases("tensor_4", precision="bf16")]
)
def test_calls_and_bytes_are_those_predicted(which: str, name: str) -> None:
    assert measured(which)[name]["rows"] == predicted_rows(which, name)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ({}, TP2 | {"sequence_parallel": False}, "tp 2 without sequence_parallel"),
        ({"vocab": 61}, TP2, "tp 2 with vocabulary of 61"),
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
