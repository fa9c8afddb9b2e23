"""How far off the sources are that nothing was fitted, chosen or tuned to.

    python docs/held_back_table.py --read     # once for each figure that is quoted

Prints the figures that stand in `tests/golden/bench/held_back.toml` (`[read]`), or reads the rows
and prints what they come to. Every reading makes the rows known a little better: they are read when
a release is made, and by nothing that chooses or fits.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from fsdpplan.files.runs.table import MeasuredRun, read_runs  # noqa: E402
from fsdpplan.validate.compare.predict import Prediction, predict_row  # noqa: E402

BENCH = ROOT / "tests" / "golden" / "bench"
ROWS = "train_runs_held_back.csv"
LEAST_ROWS = 4
"""Of a source that counts."""


def figures(runs: tuple[MeasuredRun, ...]) -> list[str]:
    """Lines: each source, and their means."""
    errors: dict[str, list[float]] = defaultdict(list)
    inside: dict[str, list[bool]] = defaultdict(list)
    timed: dict[str, int] = defaultdict(int)
    for run in runs:
        measured = run.measured_step_seconds
        if not run.is_timed or measured is None:
            continue
        timed[run.source_id] += 1
        found = predict_row(run)
        if isinstance(found, Prediction):
            band = found.step_seconds
            errors[run.source_id].append(abs(band.expected / measured - 1))
            inside[run.source_id].append(band.lower <= measured <= band.upper)
    lines = [
        f"{name} = {{ rows = {len(each)}, timed = {timed[name]}, median = {median(each):.3f}, "
        f"inside = {mean(map(float, inside[name])):.2f} }}"
        for name, each in sorted(errors.items())
    ]
    counted = [name for name, each in errors.items() if len(each) >= LEAST_ROWS]
    lines.append(f"sources = {len(counted)}")
    lines.append(f"median = {mean(median(errors[name]) for name in counted):.3f}")
    lines.append(f"inside = {mean(mean(map(float, inside[name])) for name in counted):.2f}")
    return lines


def main() -> int:
    """Print what was read, or read."""
    parser = argparse.ArgumentParser(description="figures of sources that are held back")
    parser.add_argument("--read", action="store_true", help="predict their rows, and print")
    options = parser.parse_args()
    if options.read:
        print("\n".join(figures(read_runs(BENCH / ROWS))))
        return 0
    held_back = tomllib.loads((BENCH / "held_back.toml").read_text())
    print("\n".join(f"{name} = {value}" for name, value in held_back["read"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
