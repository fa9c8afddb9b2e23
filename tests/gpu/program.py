"""fsdpplan as a user starts it, on one GPU; and what a CPU cannot show of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def fsdpplan(*words: str, folder: Path, seconds: float = 120) -> str:
    """Run the program in `folder`; what it printed, once it has ended well."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [sys.executable, "-m", "fsdpplan", *words],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": first, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert finished.returncode == 0, f"{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
    return finished.stdout


def only_a_device_shows(what: str) -> None:
    """End a test here on a CPU: what follows is about the device itself."""
    if not torch.cuda.is_available():
        pytest.skip(f"only a device shows {what}; all before that is as it should be")


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """What lets the host wait for the device raises, by CUDA's own count."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
