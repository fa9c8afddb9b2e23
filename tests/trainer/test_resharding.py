"""A checkpoint of one layout goes on in any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer import resharding

pytestmark = pytest.mark.gloo

TIMEOUT_SECONDS = 600
LOSS_TOLERANCE = 2e-5
"""Over two steps, of rounding that Adam spreads."""

ROUTED_TOLERANCE = 1e-3
"""The same where rounding may send a token to the other of two experts that score alike."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[str]]) -> Path:
    """A folder with the losses of each case and each pair of this session."""
    folder = tmp_path_factory.mktemp("resharding")
    finished = subprocess.run(
        [sys.executable, str(Path(resharding.__file__)), str(folder), *sorted(asked("pair"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    return folder


def losses(folder: Path, name: str) -> list[float]:
    """What rank 0 wrote."""
    values: list[float] = json.loads((folder / f"{name}.json").read_text())
    return values


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pair", resharding.PAIRS)
def test_what_one_layout_saved_another_goes_on_with(measured: Path, pair: str) -> None:
    source, target = resharding.PAIRS[pair]
    for name in (source, target):
        if name in resharding.MISSING:
            pytest.skip(resharding.MISSING[name])
    resumed = losses(measured, pair)
    routed = "experts" in resharding.CASES[source].plan["model"]
    tolerance = ROUTED_TOLERANCE if routed else LOSS_TOLERANCE
    assert resumed == pytest.approx(losses(measured, source), abs=tolerance)
