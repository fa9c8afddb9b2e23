"""Fixtures of the job script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emit.bench import make_bench


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A folder of stand-ins for Slurm and Python."""
    return make_bench(tmp_path)
