"""CPU time of whole command-line processes, beside what they should cost.

    python tests/benchmarks/startup.py [--runs 15]

CPU time (user and system, of the process and its children) because wall-clock time on a shared
machine measures the neighbours. A benchmark, not a test: nothing here asserts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command and the CPU seconds it should need."""

    arguments: tuple[str, ...]
    target_seconds: float


CASES = (
    Case(arguments=("--help",), target_seconds=0.25),
    Case(arguments=("recommend", "--params", "70e9", "--gpus", "64"), target_seconds=0.6),
)


def cpu_seconds(arguments: tuple[str, ...], folder: str) -> float:
    """CPU seconds of one process that runs `fsdpplan` with `arguments` in `folder`."""
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        os.execve(sys.executable, [sys.executable, "-m", "fsdpplan", *arguments], environment)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(
            f"fsdpplan {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}"
        )
    return usage.ru_utime + usage.ru_stime


def measure(case: Case, runs: int) -> list[float]:
    """CPU seconds of `runs` processes, after one that fills the caches."""
    with tempfile.TemporaryDirectory() as folder:
        return [cpu_seconds(case.arguments, folder) for _ in range(runs + 1)][1:]


def main() -> None:
    """Print one line a case, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="processes a case")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        seconds = measure(case, options.runs)
        rows.append(
            {
                "command": " ".join(("fsdpplan", *case.arguments)),
                "median_cpu_seconds": round(statistics.median(seconds), 4),
                "least_cpu_seconds": round(min(seconds), 4),
                "target_cpu_seconds": case.target_seconds,
                "runs": options.runs,
            }
        )
    if options.json:
        print(json.dumps({"python": platform.python_version(), "rows": rows}, indent=2))
        return
    print(f"{'CPU seconds, Python ' + platform.python_version():48}  median   least  target")
    for row in rows:
        print(
            f"{row['command']:48}  {row['median_cpu_seconds']:6.3f}  "
            f"{row['least_cpu_seconds']:6.3f}  {row['target_cpu_seconds']:6.2f}"
        )


if __name__ == "__main__":
    main()
