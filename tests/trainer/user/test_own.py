"""Models of one's own on four real ranks, in pieces, pipelines and split by a plan given: the same
losses as one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.own_layouts import BF16, LAYOUTS, LOADED, MOVES, measured_of
from tests.trainer.user.test_model import TOLERANCE


@pytest.fixture(scope="module")
def measured(asked: Callable[[str], set[str]]) -> dict[str, Any]:
    """What four ranks measure of the cases of this session."""
    return measured_of(asked("name"))


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_loses_as_one_process(measured: dict[str, Any], name: str) -> None:
    found, alone = measured[name], measured[LAYOUTS[name][0]]
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert found["norms"] == pytest.approx(alone["norms"], abs=TOLERANCE)
    assert found["missing"] == []


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", BF16)
def test_bf16_begins_as_fp32_does(measured: dict[str, Any], name: str) -> None:
    found, alone = measured[name], measured[BF16[name][0]]
    assert found["losses"][0] == pytest.approx(alone["losses"][0], abs=0.01)
    assert found["norms"][0] == pytest.approx(alone["norms"][0], rel=0.03)
    assert found["missing"] == []


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", MOVES)
def test_a_checkpoint_of_stages_goes_on_in_another_layout(
    measured: dict[str, Any], name: str
) -> None:
    alone = measured[MOVES[name][0]]
    assert measured[name]["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", LOADED)
def test_a_pipeline_built_on_meta_is_loaded_by_each_rank(
    measured: dict[str, Any], name: str
) -> None:
    alone = measured[LOADED[name][0]]
    assert measured[f"load {name}"]["loss"] == pytest.approx(alone["losses"][0], abs=TOLERANCE)
