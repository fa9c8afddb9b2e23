"""Adapters on real gloo: every layout trains as one process with PEFT's formula by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.support import require_runnable
from tests.trainer import adapter_layouts, jobs, plans

TOLERANCE = 1e-5
"""fp32 sums in another order; 2e-6 was the largest difference seen."""

pytestmark = pytest.mark.gloo

CASES = [(world, name) for world, cases in adapter_layouts.LAYOUTS.items() for name in cases]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]
) -> dict[int, dict[str, Any]]:
    """World -> name -> what was seen."""
    folder = tmp_path_factory.mktemp("adapters")
    function = "tests.trainer.adapter_layouts:measure_all"
    return {
        world: jobs.measured(world, function, folder / f"{world}.json", asked=asked("name"))
        for world in asked("world")
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_layout_trains_adapters_as_one_process_by_hand(
    measured: dict[int, dict[str, Any]], world: int, name: str
) -> None:
    found = measured[world][name]
    alone = found["by hand"]
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    for step, wanted in enumerate(alone["gradients"]):
        got = found["gradients"][step]
        assert got.keys() == wanted.keys()
        for key, values in wanted.items():
            difference = torch.tensor(got[key]) - torch.tensor(values)
            assert difference.abs().max() < TOLERANCE, (step, key)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "name"), CASES)
def test_the_base_does_not_change_by_a_bit(
    measured: dict[int, dict[str, Any]], world: int, name: str
) -> None:
    found = measured[world][name]
    assert found["unchanged"]
    assert found["frozen"] > 0
    assert found["trained"] <= len(found["by hand"]["gradients"][0])


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "rank": ({"rank": 30}, {}, {}, "rank 30 beside k, whose least width is 24"),
    "targets": ({"targets": ["gate"]}, {"mlp": "gelu"}, {}, "of which the model has none"),
    "tp": ({"base": "nf4"}, {}, adapter_layouts.SPLIT, "nf4 with tp 2"),
    "muon": ({}, {}, {"optimizer": "muon"}, "adapters with optimizer muon"),
    "fp16": ({}, {}, {"precision": "fp16"}, "precision with adapters fp16"),
    "experts": ({}, {"experts": {"experts": 4, "active": 2, "hidden": 32}}, {}, "routed experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_words(name: str) -> None:
    adapters, model, other, words = REFUSED[name]
    layout = other if "tp" in other else {}
    training = {} if layout else other
    text = plans.plan_text(
        model=model,
        training={"adapters": adapter_layouts.ADAPTERS | adapters, **training},
        **layout,
    )
    with pytest.raises(TrainerError, match=words):
        require_runnable(parse_plan(text))
