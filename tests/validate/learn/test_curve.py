"""After a few runs of a stack its errors are small, and the ranking is no worse for them.

Held-back rows of the published runs: each predicted with constants fitted without its project.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import exp
from statistics import mean, median

import pytest

from fsdpplan.files.bundled import bundled_runs
from fsdpplan.files.learning import load_widths
from fsdpplan.files.runs import read_runs
from fsdpplan.validate.held_out import HELD_OUT, read_held_out
from fsdpplan.validate.learn.curve import Point, curve
from fsdpplan.validate.learn.fit_widths import (
    START,
    HeldBack,
    by_project,
    fit,
    held_back,
    loss,
)
from fsdpplan.validate.learn.known import PricedRun, jobs_among
from fsdpplan.validate.learn.process import process
from fsdpplan.validate.projects import POORLY_TUNED
from fsdpplan.validate.ranking import workload

TUNED = {1: 0.073, 3: 0.052, 10: 0.042}
"""After so many runs, of all but the project whose code waits where others overlap: 7.1, 5.0 and
4.0 % were reached on 2026-11-23, and a new table may move them by a little."""
ALL = {1: 0.076, 3: 0.056, 10: 0.047}
"""With that project: 7.4, 5.4 and 4.5 %."""


@pytest.fixture(scope="module")
def rows() -> list[HeldBack]:
    table = bundled_runs()
    return held_back(read_held_out(table.parent / HELD_OUT).rows, read_runs(table))


def points(rows: Sequence[HeldBack]) -> tuple[Point, ...]:
    return curve(rows, dict.fromkeys({row.project for row in rows}, load_widths()), draws=8)


def test_errors_after_1_3_and_10_runs_of_a_stack(rows: list[HeldBack]) -> None:
    tuned = points([row for row in rows if row.project != POORLY_TUNED])
    for point in tuned:
        assert point.error_fraction <= TUNED[point.known], point
        assert 0.72 <= point.coverage_fraction <= 0.92, point
        assert point.half_width_fraction <= 0.2, point
    assert tuned[1].error_fraction <= 0.65 * tuned[1].without_fraction
    for point in points(rows):
        assert point.error_fraction <= ALL[point.known], point


def test_the_widths_are_about_the_likeliest(rows: list[HeldBack]) -> None:
    """`make fit` writes them; the fit from a start is not asked for to the last digit."""
    pytest.importorskip("scipy")
    projects = by_project(rows)
    here = loss(load_widths(), projects)
    assert here < loss(START, projects) - 3
    assert here < loss(fit(projects), projects) + 1


def groups(rows: Sequence[HeldBack], keys: Sequence[Hashable]) -> list[list[PricedRun]]:
    """Layouts of one job on one cluster, each once, where there are three or more."""
    found: dict[Hashable, dict[Hashable, list[PricedRun]]] = defaultdict(lambda: defaultdict(list))
    for key, row in zip(keys, rows, strict=True):
        found[key][row.run.features.job].append(row.run)
    return [
        [
            replace(same[0], step_seconds=median(one.step_seconds for one in same))
            for same in layouts.values()
        ]
        for layouts in found.values()
        if len(layouts) >= 3
    ]


def regret(group: Sequence[PricedRun], known: Sequence[PricedRun]) -> float:
    """How much slower the layout predicted fastest is than the best one, both measured."""
    shifts = [0.0] * len(group)
    if known:
        shifts = list(
            process(jobs_among(known), load_widths()).judged([run.features for run in group]).mean
        )
    predicted = [
        run.features.seconds * exp(shift) for run, shift in zip(group, shifts, strict=True)
    ]
    taken = group[predicted.index(min(predicted))]
    return taken.step_seconds / min(run.step_seconds for run in group) - 1


def test_what_was_run_first_makes_the_next_choice_no_worse(rows: list[HeldBack]) -> None:
    """The layout that the cost model puts first is run, and the choice is made again."""
    table = bundled_runs()
    runs = read_runs(table)
    keys, kept = [], []
    for held in read_held_out(table.parent / HELD_OUT).rows:
        found = held_back([held], runs)
        if found and runs[held.row].tp <= (runs[held.row].gpus_per_node or 8):
            keys.append((held.project, workload(runs[held.row])))
            kept += found
    before, after = [], []
    for group in groups(kept, keys):
        first = min(group, key=lambda run: run.features.seconds)
        before.append(regret(group, []))
        after.append(regret(group, [first]))
    assert len(before) >= 30
    assert mean(after) <= 0.92 * mean(before)  # 12.8 and 11.3 % on 2026-11-24
    assert median(after) <= median(before)
