"""How long the search takes: CPU seconds of whole processes on one core, the most memory they had,
layouts decided a CPU second, and what share each phase has.

    python -m tests.benchmarks.search [NAME ...] [--beside FOLDER] [--phases]

`--beside` is another checkout of fsdpplan, measured in turn with this one: the ratio is this one's
CPU seconds to its. Compiled files of both are written first.
"""

from __future__ import annotations

import argparse
import json
import os
import pstats
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]

PROBLEMS = {
    "8B on 8": "recommend --model llama-3.1-8b --gpus 8",
    "70B on 64": "recommend --params 70e9 --gpus 64",
    "405B on 1,024": "recommend --model llama-3.1-405b --gpus 1024",
    "405B on 16,384": "recommend --model llama-3.1-405b --gpus 16384 --seq-len 8192 "
    "--global-batch 2048",
    "DeepSeek-V3 on 2,048": "recommend --model deepseek-v3 --gpus 2048 --global-batch 15360",
    "1T on 98,304": "recommend --params 1e12 --gpus 98304 --seq-len 8192 --global-batch 16384",
    "70B on 64, why not tp 4": 'explain --why "tp 4"',
}
"""The last is asked of the plan that `70B on 64` saves."""

PHASES = {
    "imports": ("<frozen importlib._bootstrap>", ("_find_and_load",)),
    "groups": ("search/bounds/frontier.py", ("__post_init__",)),
    "usual settings": ("search/bounds/frontier.py", ("price_listed",)),
    "starts": ("search/bounds/pricing.py", ("_starts",)),
    "rare settings": ("search/refine.py", ("_from",)),
    "near miss": ("search/recommend.py", ("near_miss",)),
    "(legality": ("search/rules/legality.py", ("first_problem", "degrees_problem")),
    "room": ("search/bounds/room.py", ("recomputed",)),
    "memory": ("search/bounds/fitting.py", ("needed_bytes",)),
    "floors": (
        "search/bounds/floors.py",
        ("at_first_sight", "at_usual", "of_usual", "of_settled", "may_be_below", "of_changes"),
    ),
    "played": ("search/bounds/floors.py", ("played",)),
    "steps": ("cost/estimate.py", ("step_time",)),
    "estimates)": ("cost/estimate.py", ("estimate",)),
}
"""Functions whose time, with what they call, is a phase; from the bracket on, those of all phases
before, which may call each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A whole process."""

    cpu_seconds: float
    most_mb: float
    told: str


def main() -> None:
    """Print a row for each problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROBLEMS))
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--phases", action="store_true", help="how much of the time each has")
    asked = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    more = ("cpu_seconds_beside", "ratio") if asked.beside else ()
    print(
        "problem,cpu_seconds,most_mb,candidates,priced,pruned,decided_a_cpu_second", *more, sep=","
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.names or list(PROBLEMS):
            here = _run(name, HERE, Path(folder))
            row = [f'"{name}"', f"{here.cpu_seconds:.2f}", f"{here.most_mb:.0f}", *_counts(here)]
            if asked.beside:
                beside = _run(name, asked.beside, Path(folder)).cpu_seconds
                row += [f"{beside:.2f}", f"{here.cpu_seconds / beside:.2f}"]
            print(*row, sep=",", flush=True)
            if asked.phases:
                _print_phases(name, Path(folder))


def _counts(run: Run) -> list[str]:
    """Of a search: layouts that there are, that were priced, that were left out by a bound, and
    that were decided in a second."""
    try:
        search = json.loads(run.told)["search"]
    except ValueError:
        return ["", "", "", ""]
    decided = search["candidates"] / run.cpu_seconds
    return [*(str(search[key]) for key in ("candidates", "priced", "pruned")), f"{decided:.0f}"]


def _run(name: str, tree: Path, folder: Path) -> Run:
    """A problem's process, behind one that compiles the files and saves the plan that it asks."""
    words = _words(name, tree, folder)
    _process([sys.executable, "-m", "fsdpplan", words[0], "--help"], tree, folder)
    return _process([sys.executable, "-m", "fsdpplan", *words], tree, folder)


def _words(name: str, tree: Path, folder: Path) -> list[str]:
    """What is typed; own runs would change the answer."""
    words = [*shlex.split(PROBLEMS[name]), "--no-ledger"]
    if words[0] == "recommend":
        return [*words, "--json", "--no-save"]
    plan = folder / f"{abs(hash(tree))}.json"
    if not plan.exists():
        saved = [*shlex.split(PROBLEMS["70B on 64"]), "--no-ledger", "--save", str(plan)]
        _process([sys.executable, "-m", "fsdpplan", *saved], tree, folder)
    return [words[0], str(plan), *words[1:]]


def _process(command: list[str], tree: Path, folder: Path) -> Run:
    told = folder / "told"
    setting = {**os.environ, "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(folder / "cache")}
    setting.pop("PYTHONDONTWRITEBYTECODE", None)
    with told.open("w") as written:
        child = subprocess.Popen(
            command, cwd=folder, env=setting, stdout=written, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return Run(cpu_seconds=used.ru_utime, most_mb=used.ru_maxrss / 1024, told=told.read_text())


def _print_phases(name: str, folder: Path) -> None:
    """Shares of a process under cProfile, which makes short functions seem longer."""
    profile = folder / "profile"
    words = _words(name, HERE, folder)
    command = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "fsdpplan", *words]
    _process(command, HERE, folder)
    stats: Any = pstats.Stats(str(profile))
    print(f"  function calls {stats.total_calls:,}")
    shares = []
    for phase, (file, functions) in PHASES.items():
        seconds = sum(
            timed[3]
            for (path, _, function), timed in stats.stats.items()
            if path.endswith(file) and function in functions
        )
        shares.append(f"{phase} {100 * seconds / stats.total_tt:.0f} %")
    print("  " + ", ".join(shares).replace(", (", "; (") + ", of all", flush=True)


if __name__ == "__main__":
    main()
