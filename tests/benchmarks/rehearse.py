"""Seconds of a whole `fsdpplan rehearse`, beside what they should be on two cores.

    python tests/benchmarks/rehearse.py

Wall-clock time, which is what a user waits, and CPU time, which the neighbours do not change. A
benchmark, not a test: nothing here asserts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan, and the seconds that rehearsing it should take."""

    name: str
    planning: tuple[str, ...]
    target_seconds: float


CASES = (
    Case(
        name="8B on 1,024",
        planning=("--model", "llama-3.1-8b", "--gpus", "1024", "--hardware", "dgx-h100"),
        target_seconds=15.0,
    ),
    Case(
        name="70B on 1,024",
        planning=("--model", "llama-3.1-70b", "--gpus", "1024", "--hardware", "dgx-h100"),
        target_seconds=40.0,
    ),
)


def fsdpplan(*words: str, folder: str) -> int:
    """Run the program quietly; its exit code."""
    return subprocess.run(
        [sys.executable, "-m", "fsdpplan", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    ).returncode


def main() -> None:
    """Plan each case, rehearse it, print the times."""
    print("plan            wall s    CPU s   target s  exit")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            fsdpplan("recommend", *case.planning, folder=folder)
            before, began = os.times(), time.perf_counter()
            code = fsdpplan("rehearse", folder=folder)
            wall, after = time.perf_counter() - began, os.times()
            cpu = sum(after[2:4]) - sum(before[2:4])
            print(f"{case.name:14} {wall:7.1f}  {cpu:7.1f}  {case.target_seconds:9.0f}  {code:4}")


if __name__ == "__main__":
    main()
