"""A run that is killed, at whatever moment, goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gloo

KILLS = 12
PROGRAM = Path(__file__).parent / "kills.py"
TIMEOUT_SECONDS = 600


def outcome(*arguments: str) -> dict[str, Any]:
    """What the program that kills prints."""
    finished = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    document: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])  # torch 2.8 says more
    return document


@pytest.fixture(scope="module")
def random_kills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome("random", str(KILLS), str(tmp_path_factory.mktemp("kills")))


def test_every_resumed_run_ends_on_the_undisturbed_curve(random_kills: dict[str, Any]) -> None:
    assert sum(random_kills["aims"].values()) == KILLS
    assert len(random_kills["undisturbed"]) == 24
    assert random_kills["curves"]
    for curve in random_kills["curves"]:
        assert curve == random_kills["undisturbed"]


def test_whatever_was_published_is_whole(random_kills: dict[str, Any]) -> None:
    assert random_kills["problems"] == []


def test_a_save_may_be_killed_before_any_of_its_file_operations(tmp_path: Path) -> None:
    found = outcome("each", str(tmp_path))
    assert found["problems"] == []
    # first the checkpoint of before, from one moment on the new one, and never none
    assert found["resumed_steps"] == sorted(found["resumed_steps"])
    assert set(found["resumed_steps"]) == {1, 2}
    assert len(found["resumed_steps"]) > 15
