"""Pairs: two rows that differ in one thing. Is what it gains predicted?

gain = step time without / step time with
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.validate.compare.compared import ComparedRun

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
