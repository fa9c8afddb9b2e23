"""Real gloo on 4, 6 and 8 processes: wherever axes meet, a step loses as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import matrix_layouts

RANKS = Path(__file__).parent / "ranks.py"

LOSS_TOLERANCE = 1e-5
"""fp32 sums in another order, through Adam's first updates, which are the gradients' signs."""
NORM_TOLERANCE = 2e-4

pytestmark = pytest.mark.gloo

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """World -> name -> losses and norms: all layouts of a world in one set of processes."""
    found = {}
    for world in matrix_layouts.OF_WORLD:
        out = tmp_path_factory.mktemp("matrix") / f"{world}.json"
        finished = subprocess.run(
            [
                sys.executable,
                str(RANKS),
                str(world),
                "tests.trainer.matrix_layouts:measure_all",
                str(out),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        found[world] = json.loads(out.read_text(encoding="utf-8"))
    return found


CASES = [
    (world, kind, name)
    for world, by_kind in matrix_layouts.OF_WORLD.items()
    for kind, layouts in zip(("dense", "experts"), by_kind, strict=True)
    for name in layouts
]


@pytest.mark.parametrize(("world", "kind", "name"), CASES)
def test_axes_that_meet_lose_as_one_process(
    measured: dict[int, Results], world: int, kind: str, name: str
) -> None:
    expected, found = measured[world][kind], measured[world][name]
    assert found["losses"] == pytest.approx(expected["losses"], abs=LOSS_TOLERANCE)
    assert found["norms"] == pytest.approx(expected["norms"], abs=NORM_TOLERANCE)
