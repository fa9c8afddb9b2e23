"""Validated: a table of measured runs predicted after learning, from another table or from itself.

after_learning(rows, told(read_runs(other)))    # from another
left_one_out(rows)                              # each row from all others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

from fsdpplan.files.learning import load_widths
from fsdpplan.spec.ledger import Job
from fsdpplan.validate.compared import ComparedRun
from fsdpplan.validate.errors import Errors, errors_over
from fsdpplan.validate.express import Expressed, express
from fsdpplan.validate.fabric import load_request
from fsdpplan.validate.learn.evidence import Told, stack_of
from fsdpplan.validate.learn.known import (
    MOST_RUNS,
    PricedRun,
    as_priced,
    jobs_among,
    nearest_runs,
    priced_run,
)
from fsdpplan.validate.learn.learner import learned_interval
from fsdpplan.validate.learn.process import Process, process
from fsdpplan.validate.predict import Prediction
from fsdpplan.validate.report import Report, report_of


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


def after_learning(rows: Sequence[ComparedRun], known: Sequence[Told]) -> Learned:
    """Each row predicted after learning from `known`."""
    priced = [one for one in map(priced_run, known) if one is not None]
    shared: dict[tuple[str, str], Process] = {}
    after = []
    for row in rows:
        one = _priced(row)
        if one is None or not priced:
            after.append(row)
        else:
            stack = one.features.stack
            key = (stack.software, stack.runtime)
            if len(priced) > MOST_RUNS or key not in shared:
                shared[key] = _nearest_process(priced, one)
            after.append(_learned(row, one, shared[key]))
    return Learned(before=tuple(rows), after=tuple(after), runs=len(priced))


def left_one_out(rows: Sequence[ComparedRun]) -> Learned:
    """Each row predicted after learning from the others."""
    priced = [_priced(row) for row in rows]
    known = [
        one
        for row, one in zip(rows, priced, strict=True)
        if one is not None and row.error_fraction is not None
    ]
    after = []
    for row, one in zip(rows, priced, strict=True):
        others = [other for other in known if other is not one]
        if one is None or not others:
            after.append(row)
        else:
            after.append(_learned(row, one, _nearest_process(others, one)))
    return Learned(before=tuple(rows), after=tuple(after), runs=max(0, len(known) - 1))


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
    job = Job(model=expressed.model, training=expressed.training, layout=prediction.layout)
    gpus = load_request(expressed.cluster_request).gpus
    seconds = row.run.measured_step_seconds or 0.0
    return as_priced(job, gpus=gpus, time=prediction.time, stack=stack, step_seconds=seconds)
