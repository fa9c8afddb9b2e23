"""A sample of the fuzz: `make fuzz` runs ten times as many, and once as nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.safety.signals import run_signals

ROOT = Path(__file__).resolve().parents[2]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming nobody needs root")


def fuzz(*words: str) -> dict[str, int]:
    """Run it as a process of its own, which takes a mount namespace where it can."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.safety.fuzz", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return summary


def test_bad_input_is_one_sentence_and_changes_nothing() -> None:
    assert fuzz("--cases", "50")["failed"] == 0


@as_root
def test_so_it_is_for_nobody() -> None:
    assert fuzz("--cases", "12", "--seed", "7", "--as", "nobody")["failed"] == 0


def test_a_signal_at_any_moment_ends_it_in_its_own_code() -> None:
    assert run_signals(4, seed=1) == []
