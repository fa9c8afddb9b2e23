"""Tensor and context parallelism on real gloo: losses, norms and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.parallel_layouts import SETS, cases, measured, predicted_rows

FP32 = cases("tensor_4", "context_4", "threes_3")
BF16 = cases("tensor_4", "context_4", precision="bf16")

LOSS_TOLERANCE = 5e-6
"""Sums in another order: 1e-6 was the largest difference seen in losses near 4."""
NORM_TOLERANCE = 1e-5
"""2e-7 was the largest difference seen in norms near 1, before and after one update."""


Measure = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def of(asked: Callable[[str], set[str]]) -> Measure:
    """What was measured of a set: the cases of this session, each once."""
    names = frozenset(asked("name"))
    return lambda which: measured(which, names)


def expected(of: Measure, which: str, name: str) -> dict[str, list[float]]:
    """What one process loses."""
    found: dict[str, list[float]] = of(which)[SETS[which][name][0]]
    return found


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), FP32)
def test_a_layout_loses_as_one_process(of: Measure, which: str, name: str) -> None:
    found, alone = of(which)[name], expected(of, which, name)
    assert found["losses"] == pytest.approx(alone["losses"][:2], abs=LOSS_TOLERANCE)
    assert found["norms"] == pytest.approx(alone["norms"][:2], abs=NORM_TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), BF16)
def test_bf16_begins_as_fp32_does(of: Measure, which: str, name: str) -> None:
    found, alone = of(which)[name], expected(of, which, name)
    assert found["losses"][0] == pytest.approx(alone["losses"][0], abs=0.01)
    assert found["norms"][0] == pytest.approx(alone["norms"][0], rel=0.03)
    assert found["losses"][-1] < found["losses"][0]


PADDED = [case for case in [*FP32, *BF16] if "padded" in case[1]]


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), PADDED)
def test_padded_rows_never_learn(of: Measure, which: str, name: str) -> None:
    padding = of(which)[name]["padding"]
    assert padding
    assert set(padding.values()) == {0.0}  # after steps with weight decay


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("which", "name"), [*FP32, *BF16])
def test_calls_and_bytes_are_those_predicted(of: Measure, which: str, name: str) -> None:
    assert of(which)[name]["rows"] == predicted_rows(which, name)
