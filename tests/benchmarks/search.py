"""How long the search takes: CPU seconds of whole processes, layouts priced and cut by bounds.

python -m tests.benchmarks.search [NAME ...]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROBLEMS = {
    "8B on 8": "--model llama-3.1-8b --gpus 8",
    "70B on 64": "--params 70e9 --gpus 64",
    "405B on 1,024": "--model llama-3.1-405b --gpus 1024",
    "405B on 16,384": "--model llama-3.1-405b --gpus 16384 --seq-len 8192 --global-batch 2048",
    "DeepSeek-V3 on 2,048": "--model deepseek-v3 --gpus 2048 --global-batch 15360",
    "1T on 98,304": "--params 1e12 --gpus 98304 --seq-len 8192 --global-batch 16384",
}


def main(names: list[str]) -> None:
    """Print a row for each problem."""
    print("problem,cpu_seconds,candidates,priced,pruned,fastest_step_seconds")
    for name in names or list(PROBLEMS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        found = _answer(PROBLEMS[name].split())
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        search = found["search"]
        fastest = min(plan["estimate"]["step_seconds"]["expected"] for plan in found["plans"])
        counts = [search[key] for key in ("candidates", "priced", "pruned")]
        print(f'"{name}"', f"{cpu:.2f}", *counts, f"{fastest:.4f}", sep=",", flush=True)


def _answer(options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fsdpplan", "recommend", *options, "--json"]
        command += ["--no-ledger"]  # own runs would change the answer
        saved = ["--save", str(Path(folder) / "plan.json")]
        done = subprocess.run([*command, *saved], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main(sys.argv[1:])
