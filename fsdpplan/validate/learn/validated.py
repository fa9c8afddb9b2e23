"""Validated: a table of measured runs predicted after learning, from another table or from itself.

after_learning(rows, read_runs(other))          # from another
left_one_out(rows)                              # each row from all others
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import exp

from fsdpplan.cost.band import with_band
from fsdpplan.files.learning import load_widths
from fsdpplan.spec.cluster import LearnedPeaks
from fsdpplan.spec.ledger import Workload
from fsdpplan.validate.compare.compared import ComparedRun
from fsdpplan.validate.compare.errors import Errors, errors_over
from fsdpplan.validate.compare.predict import Prediction, has_room, unknown_peak_log_error
from fsdpplan.validate.compare.report import Report, report_of
from fsdpplan.validate.learn.evidence import MeasuredRow, stack_of, told
from fsdpplan.validate.learn.known import (
    MOST_RUNS,
    PricedRun,
    as_priced,
    jobs_among,
    nearest_runs,
    priced_run,
)
from fsdpplan.validate.learn.learner import learned_interval
from fsdpplan.validate.learn.peaks import (
    KNOWS,
    JobPeak,
    learned_peaks,
    peaks_among,
    priced_peaks,
    told_peaks,
)
from fsdpplan.validate.learn.process import Process, process
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.fabric import load_request


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Rows before and after learning."""

    before: tuple[ComparedRun, ...]
    after: tuple[ComparedRun, ...]
    runs: int
    """That were learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedReport:
    """What learning brought."""

    report: Report
    """After learning."""
    before_errors: Errors | None
    """Over all rows, as shipped."""
    after_errors: Errors | None
    runs: int


def learned_report(found: Learned) -> LearnedReport:
    """The errors before and after."""
    return LearnedReport(
        report=report_of(found.after),
        before_errors=errors_over(found.before),
        after_errors=errors_over(found.after),
        runs=found.runs,
    )


def after_learning(rows: Sequence[ComparedRun], known: Sequence[MeasuredRow]) -> Learned:
    """Each row predicted after learning from `known`."""
    priced = [one for one in map(priced_run, told(known)) if one is not None]
    peaks = _Peaks([one for run in told_peaks(known) for one in priced_peaks(run)])
    shared: dict[tuple[str, str], Process] = {}
    after = []
    for row in rows:
        one, learned = _priced(row), peaks.learned(row, but=[])
        if one is None or not priced:
            after.append(learned)
        else:
            stack = one.features.stack
            key = (stack.software, stack.runtime)
            if len(priced) > MOST_RUNS or key not in shared:
                shared[key] = _nearest_process(priced, one)
            after.append(_learned(learned, one, shared[key]))
    return Learned(before=tuple(rows), after=tuple(after), runs=len(priced))


def left_one_out(rows: Sequence[ComparedRun]) -> Learned:
    """Each row predicted after learning from the others."""
    priced = [_priced(row) for row in rows]
    known = [
        one
        for row, one in zip(rows, priced, strict=True)
        if one is not None and row.error_fraction is not None
    ]
    own = [[one for run in told_peaks([row.run]) for one in priced_peaks(run)] for row in rows]
    peaks = _Peaks([one for some in own for one in some])
    after = []
    for row, one, mine in zip(rows, priced, own, strict=True):
        learned = peaks.learned(row, but=mine)
        others = [other for other in known if other is not one]
        if one is None or not others:
            after.append(learned)
        else:
            after.append(_learned(learned, one, _nearest_process(others, one)))
    return Learned(before=tuple(rows), after=tuple(after), runs=max(0, len(known) - 1))


class _Peaks:
    """What peaks of memory say of rows; rows of one stack are told the same."""

    def __init__(self, priced: Sequence[JobPeak]) -> None:
        self._priced = priced
        self._said: dict[Hashable, LearnedPeaks | None] = {}

    def learned(self, row: ComparedRun, *, but: Sequence[JobPeak]) -> ComparedRun:
        """`row` as the peaks say, those of `but` aside."""
        expressed = express(row.run)
        if not isinstance(row.outcome, Prediction) or not isinstance(expressed, Expressed):
            return row
        stack, device = stack_of(row.run, expressed), load_request(expressed.cluster_request).device
        if stack is None or not self._priced:
            return row
        kind = row.memory_kind if row.memory_kind in KNOWS else "nvidia-smi"
        key = (stack, kind, *map(id, but))
        if key not in self._said:
            aside = set(map(id, but))
            near = [one for one in self._priced if id(one) not in aside]
            own = [one for one in near if one[1].stack.is_program_of(stack)]
            own.sort(key=lambda one: one[1].stack != stack)
            self._said[key] = learned_peaks(
                peaks_among(own[:MOST_RUNS]),
                stack,
                fit=device.fit,
                widths=load_widths(),
                kind=kind,
            )
        told_device = replace(device, learned_peaks=self._said[key])
        unknown = unknown_peak_log_error(expressed)
        memory = with_band(row.outcome.memory, device=told_device, unknown_log_error=unknown)
        fits = has_room(memory, told_device)
        return replace(row, outcome=replace(row.outcome, memory=memory, fits=fits))


def _nearest_process(runs: Sequence[PricedRun], one: PricedRun) -> Process:
    return _process(nearest_runs(runs, one.features, load_widths()))


def _process(runs: Sequence[PricedRun]) -> Process:
    return process(jobs_among(runs), load_widths())


def _learned(row: ComparedRun, one: PricedRun, posterior: Process) -> ComparedRun:
    """`row` as the posterior predicts it."""
    assert isinstance(row.outcome, Prediction)
    mean, deviation = posterior.one(one.features)
    step = learned_interval(one.features.seconds, exp(mean), deviation)
    return replace(row, outcome=replace(row.outcome, step_seconds=step))


def _priced(row: ComparedRun) -> PricedRun | None:
    """A predicted row as the learner sees it; its time is 0 where none was measured."""
    expressed = express(row.run)
    prediction = row.prediction
    if prediction is None or not isinstance(expressed, Expressed):
        return None
    stack = stack_of(row.run, expressed)
    if stack is None:
        return None
    job = Workload(model=expressed.model, training=expressed.training, layout=prediction.layout)
    gpus = load_request(expressed.cluster_request).gpus
    seconds = row.run.measured_step_seconds or 0.0
    return as_priced(job, gpus=gpus, time=prediction.time, stack=stack, step_seconds=seconds)
