"""Differences: of two layouts of one job, how well is the ratio of their step times predicted?

Every pair of layouts of one model, cluster and batch that one source measured, both predicted with
constants that were fitted without its project. What the errors of their parts do not explain of the
difference, `layout_fraction`, is the least that brings 80 % of the pairs inside; n pairs of a
project count as sqrt(n), as everywhere. It is not made larger than that: a wide error makes ties,
and ties hide what is known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, log, sqrt
from statistics import median

from fsdpplan.cost.band import NORMAL_80, difference_log_error
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.cluster import Evidence, StepError
from fsdpplan.spec.estimate import TimeBreakdown
from fsdpplan.validate.compare.ranking import workload
from fsdpplan.validate.fit.held_out import HeldOutRow

WANTED_COVERAGE = 0.8
"""Share of pairs whose difference the error is to hold."""

MOST_LAYOUT_ERROR = 0.3
"""Up to here `layout_fraction` is looked for, in thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPair:
    """Two layouts of one job."""

    one: HeldOutRow
    other: HeldOutRow

    @property
    def log_difference(self) -> float:
        """How far the logarithm of their predicted ratio is off."""
        return log_residual(self.one) - log_residual(self.other)

    def half_width(self, error: StepError) -> float:
        """Half of the 80 % band of the logarithm of their ratio."""
        return NORMAL_80 * difference_log_error(self.one.time, self.other.time, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many pairs have a difference within its error."""

    pairs: int
    inside: int
    weighted_fraction: float
    """Share inside, n pairs of a project counting as sqrt(n)."""
    median_error_fraction: float
    """Half of the pairs have a smaller error, as a share of the step time."""

    @property
    def fraction(self) -> float:
        """Share inside, every pair counting as one."""
        return self.inside / self.pairs


def log_residual(row: HeldOutRow) -> float:
    """log(predicted / measured)."""
    return log(row.predicted_step_seconds / row.measured_step_seconds)


def layout_pairs(rows: Sequence[HeldOutRow], runs: Sequence[MeasuredRun]) -> tuple[LayoutPair, ...]:
    """Pairs of layouts of one job. Rows of one layout count once, with the median of its times."""
    jobs: dict[Hashable, dict[TimeBreakdown, list[HeldOutRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        jobs[workload(runs[row.row])][row.time].append(row)
    return tuple(
        LayoutPair(one=one, other=other)
        for layouts in jobs.values()
        for one, other in combinations(map(_once, layouts.values()), 2)
    )


def _once(same: Sequence[HeldOutRow]) -> HeldOutRow:
    """One row for those that are predicted alike."""
    measured = median(row.measured_step_seconds for row in same)
    return replace(same[0], measured_step_seconds=measured)


def fit_layout_error(pairs: Sequence[LayoutPair], errors: Mapping[Evidence, StepError]) -> float:
    """The least `layout_fraction` with which `errors`, by the device's evidence, hold 80 % of
    `pairs`."""
    steps = (step / 1000 for step in range(int(1000 * MOST_LAYOUT_ERROR)))
    return next(
        (
            each
            for each in steps
            if coverage(pairs, _with_layout_error(errors, each)).weighted_fraction
            >= WANTED_COVERAGE
        ),
        MOST_LAYOUT_ERROR,
    )


def _with_layout_error(
    errors: Mapping[Evidence, StepError], fraction: float
) -> dict[Evidence, StepError]:
    return {kind: replace(error, layout_fraction=fraction) for kind, error in errors.items()}


def coverage(pairs: Sequence[LayoutPair], errors: Mapping[Evidence, StepError]) -> Coverage:
    """How many of `pairs` are inside; `errors` by the device's evidence."""
    widths = [pair.half_width(errors[pair.one.evidence]) for pair in pairs]
    inside = [abs(pair.log_difference) <= width for pair, width in zip(pairs, widths, strict=True)]
    projects = [pair.one.project for pair in pairs]
    return Coverage(
        pairs=len(pairs),
        inside=sum(inside),
        weighted_fraction=_weighted(zip(projects, inside, strict=True), Counter(projects)),
        median_error_fraction=exp(median(widths)) - 1,
    )


def _weighted(inside: Iterable[tuple[str, bool]], counts: Counter[str]) -> float:
    total = sum(one / sqrt(counts[project]) for project, one in inside)
    return total / sum(map(sqrt, counts.values()))
