"""Verify: a finished run against its plan, and the limits that it must keep."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsdpplan.emit.slurm.header import (
    MAX_SCRIPT_BYTES,
    PLAN_NAME,
    job_plan,
    plan_digest,
    read_metrics_path,
)
from fsdpplan.errors import SpecError
from fsdpplan.files import plans
from fsdpplan.files.table import read_text
from fsdpplan.run.compare import AxisComparison, Comparison, collectives, compare, overlap
from fsdpplan.run.follow.jobs import METRICS_NAME, RUNS_FOLDER
from fsdpplan.run.follow.metrics import Measured, read_metrics
from fsdpplan.run.launch import FILE_NAMES
from fsdpplan.run.plans import in_precision, plan_from_json, read_plan, with_stages
from fsdpplan.run.script_plan import plan_text
from fsdpplan.spec.ledger import LEAST_STEPS
from fsdpplan.spec.plan import Plan
from fsdpplan.units import format_gib, format_percent, format_seconds

MAX_METRICS_BYTES = 2**30

GateName = Literal["min_mfu", "max_reserved", "max_error", "min_overlap", "max_idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What a run left, and the plan that it ran."""

    metrics: Path
    plan: Plan
    plan_sha256: str
    measured: Measured

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what stands between the numbers."""
        if self.changed:
            return (*self._ended, f"the precision changed: only steps in {self.changed} are told")
        return self._ended

    @property
    def changed(self) -> str:
        """The precision of the last part, where it changed in the run; empty: it did not."""
        seen = dict.fromkeys(one.precision for one in self.measured.steps)
        return self.measured.precision or "" if len(seen) > 1 else ""

    @property
    def _ended(self) -> tuple[str, ...]:
        summary, start = self.measured.summary, self.measured.start
        if summary is not None and summary.stopped_by_signal is not None:
            return (f"the run was stopped by signal {summary.stopped_by_signal} before its end",)
        if summary is None and start is None:
            return ("the program wrote no summary: the numbers are medians of its steps",)
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run must keep to. None: not asked."""

    min_mfu_fraction: float | None = None
    max_reserved_bytes: int | None = None
    max_error_fraction: float | None = None
    """Of the step time, either way."""
    min_overlap_fraction: float | None = None
    """Of communication that other kernels hide, in the steps that were profiled."""
    max_idle_seconds: float | None = None
    """Of each of these steps, in which no kernel ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One limit beside what was measured."""

    name: GateName
    limit: float
    value: float
    passed: bool

    @property
    def words(self) -> str:
        """What is past the limit, in one clause."""
        match self.name:
            case "min_mfu":
                return f"MFU is {format_percent(self.value)}, below {format_percent(self.limit)}"
            case "max_reserved":
                return (
                    f"{format_gib(int(self.value))} were reserved, more than "
                    f"{format_gib(int(self.limit))}"
                )
            case "max_error":
                return (
                    f"the predicted step time is off by {format_percent(self.value)}, more than "
                    f"{format_percent(self.limit)}"
                )
            case "min_overlap":
                return (
                    f"{format_percent(self.value)} of communication is hidden, less than "
                    f"{format_percent(self.limit)}"
                )
            case "max_idle":
                return (
                    f"the device is idle for {format_seconds(self.value)} of a step, more than "
                    f"{format_seconds(self.limit)}"
                )


def finished_run(place: Path | None, *, plan_file: Path | None, folder: Path) -> FinishedRun:
    """The run at `place`, its folder or its metrics file; by default the newest one of `folder`.

    Its plan is that of the script beside its metrics, unless `plan_file` names one. Raises
    SpecError where the two are no pair, or too little was measured.
    """
    run = run_so_far(place, plan_file=plan_file, folder=folder)
    _require_end(run.measured, run.metrics)
    return run


def run_so_far(place: Path | None, *, plan_file: Path | None, folder: Path) -> FinishedRun:
    """The same of a run that may have failed, or not have ended."""
    found = newest_run(folder) if place is None else place
    metrics = _metrics_of(found, folder)
    plan, digests = _plan_of(found, plan_file, folder)
    text = read_text(metrics, limit_bytes=MAX_METRICS_BYTES, what="metrics file")
    measured = read_metrics(text)
    told = None if measured.start is None else measured.start.plan_sha256
    digest = told if told in digests else digests[0]
    _require_pair(measured, digest, plan, metrics)
    measured_plan = in_precision(plan, measured.precision)
    return FinishedRun(metrics=metrics, plan=measured_plan, plan_sha256=digest, measured=measured)


def newest_run(folder: Path) -> Path:
    """The folder of the last run that was started in `folder`."""
    runs = folder / RUNS_FOLDER
    scripts = [
        script for name in FILE_NAMES for script in runs.glob(f"*/{name}") if script.is_file()
    ]
    if not scripts:
        raise SpecError(
            f"there is no run in {runs}: type fsdpplan run first, or name a run's folder or its "
            "metrics file"
        )
    return max(scripts, key=lambda script: (script.stat().st_mtime_ns, script.parent.name)).parent


def _metrics_of(found: Path, folder: Path) -> Path:
    if not os.path.exists(found):
        raise SpecError(f"{found} does not exist: name a run's folder or its metrics file")
    if not os.path.isdir(found):
        return found
    script = _script_of(found)
    own = None if script is None else read_metrics_path(_text_of(script))
    metrics = found / METRICS_NAME if own is None else folder / own
    if not os.path.exists(metrics):
        raise SpecError(
            f"{found} has no {metrics.name}: the run reported no step; see in "
            f"{found / 'job.log'} why, and type fsdpplan run to start another"
        )
    return metrics


def _script_of(found: Path) -> Path | None:
    folder = found if os.path.isdir(found) else found.parent
    return next((folder / name for name in FILE_NAMES if (folder / name).is_file()), None)


def _text_of(script: Path) -> str:
    return read_text(script, limit_bytes=MAX_SCRIPT_BYTES, what="job script")


def _plan_of(found: Path, plan_file: Path | None, folder: Path) -> tuple[Plan, tuple[str, ...]]:
    """(plan, its sha256 as a job script has it, of each form that it may have there)."""
    if plan_file is None:
        script = _script_of(found)
        text = None if script is None else plan_text(_text_of(script), script)
        if text is not None:
            return plan_from_json(text, where=f"the plan inside {found}"), (plan_digest(text),)
        plan_file = folder / PLAN_NAME
        if not os.path.exists(plan_file):
            raise SpecError(
                f"there is no plan beside {found}, nor {plan_file}: name the plan of that run "
                "with --plan"
            )
    return read_plan(plan_file), tuple(plan_digest(text) for text in _carried_texts(plan_file))


def _carried_texts(plan_file: Path) -> tuple[str, ...]:
    """The texts by which a job may carry the plan in a file: what is carried today, and what the
    fsdpplan that wrote the plan made of it, without what has come since."""
    written = plans.read_plan(plan_file)
    today = plans.carried_json(job_plan(with_stages(written)))
    return today, plans.carried_like(job_plan(written), plan_file)


def _require_pair(measured: Measured, digest: str, plan: Plan, metrics: Path) -> None:
    start = measured.start
    told = None if start is None else start.plan_sha256
    if told is not None and told != digest:
        raise SpecError(
            f"{metrics} is of another plan (sha256 {told[:12]}, not {digest[:12]}): name the plan "
            "of that run with --plan, or another run"
        )
    world = None if measured.summary is None else measured.summary.world
    if world is not None and world != plan.layout.world:
        raise SpecError(
            f"{metrics} is of a run with {world} ranks, and the plan has {plan.layout.world}: name "
            "the plan of that run with --plan"
        )


def _require_end(measured: Measured, metrics: Path) -> None:
    if measured.start is not None and measured.summary is None:
        raise SpecError(
            f"the run of {metrics} has not ended, or was killed, after {len(measured.steps)} "
            "steps: wait for it, or run it again"
        )
    if measured.measured_steps < LEAST_STEPS:
        raise SpecError(
            f"the run of {metrics} has {measured.measured_steps} steps to measure, and "
            f"{LEAST_STEPS} are the least: train longer, such as 20 steps"
        )


def comparison(run: FinishedRun) -> tuple[Comparison, ...]:
    """Predicted beside measured, one row a quantity."""
    return compare(estimate=run.plan.estimate, measured=run.measured)


def communication(run: FinishedRun) -> tuple[AxisComparison, ...]:
    """The collectives of one step, those of the plan first; nothing where none were reported."""
    return collectives(estimate=run.plan.estimate, measured=run.measured)


def gates(run: FinishedRun, limits: Limits) -> tuple[Gate, ...]:
    """The limits that were asked for. Raises SpecError where the run cannot be held to one."""
    rows = {row.quantity: row for row in comparison(run)}
    found = []
    if limits.min_mfu_fraction is not None:
        value, limit = _value(rows, "mfu_fraction", "--min-mfu"), limits.min_mfu_fraction
        found.append(Gate(name="min_mfu", limit=limit, value=value, passed=value >= limit))
    if limits.max_reserved_bytes is not None:
        value = _value(rows, "peak_reserved_bytes", "--max-reserved")
        most = limits.max_reserved_bytes
        found.append(Gate(name="max_reserved", limit=most, value=value, passed=value <= most))
    if limits.max_error_fraction is not None:
        _value(rows, "step_seconds", "--max-error")
        value, limit = abs(rows["step_seconds"].error_fraction or 0.0), limits.max_error_fraction
        found.append(Gate(name="max_error", limit=limit, value=value, passed=value <= limit))
    if limits.min_overlap_fraction is not None:
        limit, value = limits.min_overlap_fraction, _profiled(_hidden(run), "--min-overlap")
        found.append(Gate(name="min_overlap", limit=limit, value=value, passed=value >= limit))
    if limits.max_idle_seconds is not None:
        limit, value = limits.max_idle_seconds, _profiled(_idle(run), "--max-idle")
        found.append(Gate(name="max_idle", limit=limit, value=value, passed=value <= limit))
    return tuple(found)


def _hidden(run: FinishedRun) -> float | None:
    found = overlap(communication(run))
    return None if found is None else found.measured_fraction


def _idle(run: FinishedRun) -> float | None:
    return None if run.measured.profiled is None else run.measured.profiled.idle_seconds


def _profiled(value: float | None, flag: str) -> float:
    if value is None:
        raise SpecError(
            f"{flag} asks for what the profiler sees, and the run has profiled no step that shows "
            "it: run it with --profile 10:3, or leave it out"
        )
    return value


def _value(rows: dict[str, Comparison], quantity: str, flag: str) -> float:
    row = rows.get(quantity)
    if row is None or row.measured is None:
        why = "it ran on CPUs, which have no allocator to ask" if row is None else "it is missing"
        raise SpecError(
            f"{flag} asks for {quantity}, which the run did not report ({why}): leave it out"
        )
    return row.measured
