"""Real gloo on 4, 6 and 8 processes: wherever axes meet, a step loses as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer import jobs, losses, matrix_layouts

LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order, through Adam's first updates, which are the gradients' signs."""
NORM_TOLERANCE = 2e-4

pytestmark = pytest.mark.gloo

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]
) -> dict[int, Results]:
    """World -> name -> losses and norms: all layouts of a world in one set of processes."""
    folder = tmp_path_factory.mktemp("matrix")
    function = "tests.trainer.matrix_layouts:measure_all"
    return {
        world: jobs.measured(world, function, folder / f"{world}.json", asked=asked("name"))
        for world in asked("world")
    }


CASES = [
    (world, kind, name)
    for world, by_kind in matrix_layouts.OF_WORLD.items()
    for kind, layouts in zip(("dense", "experts"), by_kind, strict=True)
    for name in layouts
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "kind", "name"), CASES)
def test_axes_that_meet_lose_as_one_process(
    measured: dict[int, Results], world: int, kind: str, name: str
) -> None:
    layout = {"dense": {}, "experts": matrix_layouts.OF_WORLD[world][1].get(name)}[kind]
    found = measured[world][name]
    expected = measured[world][losses.reference_name(kind, layout or {})]
    steps = matrix_layouts.STEPS
    assert found["losses"] == pytest.approx(expected["losses"][:steps], abs=LOSS_TOLERANCE)
    assert found["norms"] == pytest.approx(expected["norms"][:steps], abs=NORM_TOLERANCE)
