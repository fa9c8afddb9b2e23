"""The auxiliary loss of mixtures in pipelines: gradients, and what stages tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trainer import jobs, plans
from tests.trainer.pressed_layouts import BF16, EXPERTS, LAYOUTS

pytestmark = pytest.mark.gloo

Results = dict[str, Any]

CASES = [(world, name) for world, layouts in LAYOUTS.items() for name in layouts]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]
) -> dict[int, Results]:
    """World -> name -> what its ranks found."""
    folder = tmp_path_factory.mktemp("pressed")
    function = "tests.trainer.pressed_layouts:measure_all"
    return {
        world: jobs.measured(world, function, folder / f"{world}.json", asked=asked("name"))
        for world in {4, *asked("world")}
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_pipeline_presses_by_what_each_micro_batch_itself_has_chosen(
    measured: dict[int, Results], world: int, name: str
) -> None:
    """In every step and stage, as one process does: gradients of all parameters, and the value."""
    for rank in measured[world][name]["ranks"]:
        assert max(rank["errors"]) < 1e-5
        assert max(rank["auxiliary"]) < 1e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("world", "name"), CASES)
def test_choices_travel_beside_activations_and_nothing_does_without_the_loss(
    measured: dict[int, Results], world: int, name: str
) -> None:
    """One message more for each, of a number for each expert."""
    for rank in measured[world][name]["ranks"]:
        assert set(rank["without"]) == {"fp32"}
        count, _ = rank["without"]["fp32"]
        assert rank["with"] == rank["without"] | {"float64": [count, count * EXPERTS * 8]}


@pytest.mark.parametrize("name", BF16)
def test_choices_are_counted_exactly_beside_activations_in_bf16(
    measured: dict[int, Results], name: str
) -> None:
    """All mixtures are pressed by one f, which is of whole tokens: more than bf16 can count."""
    ranks = measured[4][name]["ranks"]
    pressures = torch.tensor([each for rank in ranks for each in rank["pressed_by"]])
    assert len(pressures) == 8
    assert (pressures == pressures[0]).all()
    choices = plans.GLOBAL_BATCH * 24 * 2 * 4  # of rows of tokens, two each in four mixtures
    chosen = pressures[0].double() / pressures[0].double().sum() * choices
    assert chosen.max() > 256
    torch.testing.assert_close(chosen, chosen.round(), rtol=0, atol=1e-3)
    for rank in ranks:
        count, _ = rank["with"]["bf16"]
        assert rank["with"]["float64"] == [count, count * EXPERTS * 8]
