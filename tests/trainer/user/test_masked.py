"""Labels of -100 of unequal number on four real ranks: gradients are those of one process, in every
layout, or the loss is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.masked_layouts import LAYOUTS, REFUSED, is_data_parallel, measured_of


@pytest.fixture(scope="module")
def measured(asked: Callable[[str], set[str]]) -> dict[str, Any]:
    """What four ranks measure of the cases of this session."""
    return measured_of(asked("name"))


@pytest.mark.sampled(3)
@pytest.mark.gloo
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_masked_rows_are_those_of_one_process(
    measured: dict[str, Any], name: str
) -> None:
    tolerance = 1e-6 if is_data_parallel(LAYOUTS[name][1]) else 1e-5
    found = measured[name]
    assert len(found) in (3, 6)  # three kinds of rows, by forward_backward and a loop
    errors = {kind: each["gradients"] for kind, each in found.items()}
    assert errors == pytest.approx(dict.fromkeys(errors, 0), abs=tolerance)
    losses = {kind: each["loss"] for kind, each in found.items()}
    assert losses == pytest.approx(dict.fromkeys(losses, 0), abs=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", REFUSED)
def test_unequal_numbers_that_nobody_counted_are_refused(
    measured: dict[str, Any], name: str
) -> None:
    found = measured[f"refused: {name}"]
    assert (found["equal"], found["equal again"]) == ("", "")
    assert "the gradient depends on the layout" in found["ragged"]
    assert "targets_per_micro_batch(plan, targets)" in found["ragged"]
