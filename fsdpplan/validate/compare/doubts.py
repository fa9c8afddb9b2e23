"""Rows of a table of measured runs that somebody should look at again before others use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fsdpplan.files.runs.table import read_runs
from fsdpplan.files.table import Finding
from fsdpplan.validate.compare.compared import ComparedRun
from fsdpplan.validate.compare.report import report
from fsdpplan.validate.runs.skipped import Skipped

FAR = 3.0
"""Times the prediction, or a part of it, past which a row is asked about."""


def doubts(path: Path) -> tuple[Finding, ...]:
    """Rows of the table at `path` that cannot be predicted, each for its reason, or whose step time
    or peak lies far from the prediction: units, or what was counted, are likelier than a
    finding."""
    return tuple(
        one for row in report(read_runs(path)).rows for one in _doubts(row, f"row {row.run.row}")
    )


def _doubts(row: ComparedRun, place: str) -> Iterator[Finding]:
    if isinstance(row.outcome, Skipped):
        yield Finding(kind="unsourced", where=place, what=f"not predicted: {row.outcome.sentence}")
        return
    if _is_far(row.error_fraction) and row.run.is_timed:
        step = row.outcome.step_seconds.expected
        what = (
            f"{row.run.measured_step_seconds:.4g} s where {step:.4g} s are predicted: a step is an "
            "optimizer step over the whole batch, a rate is of one GPU"
        )
        yield Finding(kind="implausible", where=f"{place}, step time", what=what)
    if _is_far(row.memory_error_fraction):
        what = "far from the prediction: it is GiB, of the fullest GPU and not of all"
        yield Finding(kind="implausible", where=f"{place}, peak_mem_gib", what=what)


def _is_far(error_fraction: float | None) -> bool:
    """Whether predicted over measured, less 1, is past `FAR` one way or the other."""
    return error_fraction is not None and not 1 / FAR <= 1 + error_fraction <= FAR
