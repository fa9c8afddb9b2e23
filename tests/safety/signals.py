"""Signals at random moments of a command, its start-up included.

    python -m tests.safety.signals --signals 200

Each must end it in its own exit code, with at most one word and no traceback, or come too late; and
the plan that it saves is whole, the one before or the one after.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ASKED = [
    "recommend",
    "--params",
    "1e9",
    "--gpus",
    "8",
    "--hardware",
    "dgx-h100",
    "--no-ledger",
    "--save",
    "plan.json",
]
FIRST_SECONDS = 0.05
"""About as long as Python's own start takes, in which nothing of ours can hear a signal yet."""
SAYS = {"", "interrupted\n", "terminated\n"}
HEARS = ("in main", "in begin")
"""Frames of a traceback: our first one, and the one which makes us hear signals."""


def broken(number: int, code: int, err: str, folder: Path) -> str:
    """Which promise does not hold; empty where all do."""
    if code not in (0, 128 + number, -number):
        return f"exit code {code} after signal {number}: {err!r}"
    # Until our first lines have run, Python's own start hears signals, and shows a traceback.
    if code and err not in SAYS and HEARS[0] in err and HEARS[1] not in err:
        return err
    left = [path.name for path in folder.iterdir() if path.name != "plan.json"]
    if left:
        return f"left behind: {left}"
    plan = folder / "plan.json"
    return "" if not plan.exists() or plan.read_text().endswith("}\n") else "half a plan"


def run_signals(signals: int, *, seed: int) -> list[str]:
    """Send that many; the promises that were broken."""
    words = [sys.executable, "-m", "fsdpplan", *ASKED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    chance, counted, problems = random.Random(seed), Counter[int](), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
        seconds = time.monotonic() - began
        for _ in range(signals):
            number = chance.choice(NUMBERS)
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            time.sleep(FIRST_SECONDS + chance.random() ** 2 * seconds)
            process.send_signal(number)
            err = process.communicate(timeout=240)[1]
            counted[process.returncode] += 1
            if problem := broken(number, process.returncode, err, folder):
                problems.append(problem)
    print({"signals": signals, "codes": dict(counted), "problems": len(problems)})
    return problems


def main() -> int:
    """Send signals; 1 where one broke a promise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    problems = run_signals(asked.signals, seed=asked.seed)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
