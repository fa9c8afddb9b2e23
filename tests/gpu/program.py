"""fsdpplan as a user starts it, on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
