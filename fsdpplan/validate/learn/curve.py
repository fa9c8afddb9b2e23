"""Learning curve: how far predictions are off after so many runs of a stack.

    python -m fsdpplan.validate.learn.curve [--by project|stack]
    python -m fsdpplan.validate.learn.curve --fit       # writes the widths; or: make fit

Rows are those of `held_out.json`: each predicted with constants fitted without its project, and the
widths of the learner are fitted without it, too (`widths.json` beside it). Of every stack
(software, number format and device of one project) some rows are learned from and the others
predicted; that is repeated with other rows, and errors are medians over rows, means over repeats,
then over stacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import mean, median

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.files.learning import load_widths
from fsdpplan.files.runs.table import bundled_runs
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.spec.ledger import Widths
from fsdpplan.validate.learn.fit_widths import (
    AFTER,
    LEAST_TESTS,
    HeldBack,
    bundled_held_back,
    draws_of,
    fit,
)
from fsdpplan.validate.learn.known import PricedRun, jobs_among
from fsdpplan.validate.learn.process import process
from fsdpplan.validate.learn.surprise import shuffled

WIDTHS = "widths.json"
"""Project -> widths fitted to the others, beside the table of runs."""

DRAWS = 12
"""Repeats with other known rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Errors of one stack, or their mean, after some runs."""

    known: int
    """Runs that were learned from."""
    stacks: int
    error_fraction: float
    """Median over rows of |predicted / measured - 1|."""
    without_fraction: float
    """The same without the runs."""
    coverage_fraction: float
    """Share of the measured times inside the 80 % band."""
    half_width_fraction: float


def curve(
    rows: Sequence[HeldBack],
    widths: Mapping[str, Widths],
    *,
    by_stack: bool = True,
    draws: int = DRAWS,
) -> tuple[Point, ...]:
    """Means over stacks, or projects, after each of `AFTER` runs; `widths` by project."""
    groups: dict[Hashable, list[HeldBack]] = {}
    for row in rows:
        stack = row.run.features.stack if by_stack else None
        groups.setdefault((row.project, stack), []).append(row)
    found = []
    for known in AFTER:
        points = [
            after(group, known, widths[group[0].project], draws=draws)
            for group in groups.values()
            if len(group) >= known + LEAST_TESTS
        ]
        found.append(_mean(points, known))
    return tuple(found)


def after(rows: Sequence[HeldBack], known: int, widths: Widths, *, draws: int = DRAWS) -> Point:
    """One stack's errors after `known` of its runs."""
    runs = [row.run for row in rows]
    orders = (shuffled(len(runs), draw) for draw in range(draws))
    drawn = [_scored([runs[place] for place in order], known, widths) for order in orders]
    return _mean(drawn, known)


def _scored(runs: Sequence[PricedRun], known: int, widths: Widths) -> Point:
    """The first ones known, the others predicted."""
    posterior = process(jobs_among(runs[:known]), widths)
    tests = runs[known:]
    judged = posterior.judged([run.features for run in tests])
    off = [log(run.step_seconds / run.features.seconds) for run in tests]
    left = [one - float(shift) for one, shift in zip(off, judged.mean, strict=True)]
    bands = [NORMAL_80 * float(one) for one in judged.deviation]
    inside = [abs(one) <= band for one, band in zip(left, bands, strict=True)]
    return Point(
        known=known,
        stacks=1,
        error_fraction=median(abs(exp(-one) - 1) for one in left),
        without_fraction=median(abs(exp(-one) - 1) for one in off),
        coverage_fraction=mean(map(float, inside)),
        half_width_fraction=median(exp(band) - 1 for band in bands),
    )


def _mean(points: Sequence[Point], known: int) -> Point:
    return Point(
        known=known,
        stacks=len(points),
        error_fraction=mean(point.error_fraction for point in points),
        without_fraction=mean(point.without_fraction for point in points),
        coverage_fraction=mean(point.coverage_fraction for point in points),
        half_width_fraction=mean(point.half_width_fraction for point in points),
    )


def widths_without(rows: Sequence[HeldBack], project: str) -> Widths:
    """Widths fitted to the other projects, searched for from those that ship."""
    return fit(draws_of([row for row in rows if row.project != project]), load_widths())


def written_widths() -> dict[str, Widths]:
    """Those that `--fit` wrote, by the project that had no part in them."""
    document = json.loads((bundled_runs().parent / WIDTHS).read_text())
    return {project: Widths(**widths) for project, widths in document.items()}


def write_widths(rows: Sequence[HeldBack]) -> Path:
    """Fit without each project in its turn, and write what comes of it."""
    found = {
        name: {key: float(f"{value:.6g}") for key, value in asdict(widths).items()}
        for name in dict.fromkeys(row.project for row in rows)
        for widths in [widths_without(rows, name)]
    }
    path = bundled_runs().parent / WIDTHS
    text = json.dumps(found, indent=1) + "\n"
    write_text_atomically(path, text, advice="a checkout's tables are written to")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the curve, of widths fitted anew where that is asked."""
    parser = argparse.ArgumentParser(description="How far predictions are off after some runs.")
    parser.add_argument("--by", choices=("project", "stack"), default="stack")
    parser.add_argument("--fit", action="store_true", help="first fit the widths, and write them")
    options = parser.parse_args(arguments)
    rows = bundled_held_back()
    if options.fit:
        print(f"wrote {write_widths(rows).name}")
    for point in curve(rows, written_widths(), by_stack=options.by == "stack"):
        print(
            f"after {point.known:2d}: {point.error_fraction:.1%} "
            f"(without {point.without_fraction:.1%}), inside {point.coverage_fraction:.0%}, "
            f"half-width {point.half_width_fraction:.0%}, {point.stacks} {options.by}s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
