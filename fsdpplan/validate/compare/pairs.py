"""Pairs: two rows that differ in one thing. Is what it gains predicted?

gain = step time without / step time with

Differences: of two layouts of one job, how well is the ratio of their step times predicted?

Every pair of layouts of one model, cluster and batch that one source measured, both predicted with
constants that were fitted without its project. What the errors of their parts do not explain of the
difference, `layout_fraction`, is the least that brings 80 % of the pairs inside; n pairs of a
project count as sqrt(n), as everywhere. It is not made larger than that: a wide error makes ties,
and ties hide what is known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import exp, log, sqrt
from statistics import median
from typing import Literal

from fsdpplan.cost.band import NORMAL_80, difference_log_error
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.cluster import Evidence, StepError
from fsdpplan.spec.plan import TimeBreakdown
from fsdpplan.validate.compare.compared import ComparedRun
from fsdpplan.validate.compare.ranking import workload
from fsdpplan.validate.fit.held_out import HeldOutRow

Change = Literal["compile", "async_tp", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two rows of one source that differ in `change` alone."""

    change: Change
    without: ComparedRun
    with_change: ComparedRun

    @property
    def measured_gain(self) -> float:
        """Measured step time without over that with the change."""
        return _measured(self.without) / _measured(self.with_change)

    @property
    def predicted_gain(self) -> float:
        """The same as predicted."""
        return _predicted(self.without) / _predicted(self.with_change)

    @property
    def error_fraction(self) -> float:
        """Predicted over measured gain, less 1."""
        return self.predicted_gain / self.measured_gain - 1


def pairs_among(rows: Sequence[ComparedRun]) -> tuple[Pair, ...]:
    """Every pair of compared rows, by change and then in the rows' order."""
    timed = [row for row in rows if row.error_fraction is not None]
    found: list[Pair] = []
    for change in ("compile", "async_tp", "fp8"):
        found += _pairs(timed, change)
    return tuple(found)


def _pairs(rows: Sequence[ComparedRun], change: Change) -> Iterator[Pair]:
    groups: dict[Hashable, tuple[list[ComparedRun], list[ComparedRun]]] = defaultdict(
        lambda: ([], [])
    )
    has, without = _CHANGES[change]
    for row in rows:
        groups[_setting(without(row.run))][has(row.run)].append(row)
    for plain, changed in groups.values():
        for before, after in product(plain, changed):
            yield Pair(change=change, without=before, with_change=after)


_CHANGES: dict[
    Change, tuple[Callable[[MeasuredRun], bool], Callable[[MeasuredRun], MeasuredRun]]
] = {
    "compile": (lambda run: run.compile is True, lambda run: replace(run, compile=None)),
    "async_tp": (lambda run: run.async_tp, lambda run: replace(run, async_tp=False)),
    "fp8": (lambda run: run.dtype.startswith("fp8"), lambda run: replace(run, dtype="")),
}
"""Whether a run has the change, and the run without any word on it."""


def _setting(run: MeasuredRun) -> Hashable:
    """`run` without what was measured and where it is written."""
    return replace(
        run,
        row=0,
        date="",
        step_seconds=None,
        tokens_per_second_per_gpu=None,
        peak_memory_bytes=None,
        mfu=None,
        hfu=None,
        notes="",
    )


def _measured(row: ComparedRun) -> float:
    seconds = row.run.measured_step_seconds
    assert seconds is not None
    return seconds


def _predicted(row: ComparedRun) -> float:
    assert row.prediction is not None
    return row.prediction.step_seconds.expected


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
