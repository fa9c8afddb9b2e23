"""A run's row in the ledger."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from fsdpplan import __version__
from fsdpplan.emit.slurm.header import script_digest
from fsdpplan.errors import SpecError
from fsdpplan.files.ledger import append_row
from fsdpplan.run.compare import compare
from fsdpplan.run.follow.metric_events import Summary
from fsdpplan.run.launch import Launch
from fsdpplan.run.outcome import Outcome
from fsdpplan.run.plans import in_precision
from fsdpplan.run.session import INTERRUPTED
from fsdpplan.run.verify import FinishedRun
from fsdpplan.spec.ledger import Failure, LedgerRow, Machines, Observed, Predicted, Workload
from fsdpplan.spec.plan import Plan

LOG_END_BYTES = 256 * 1024
"""Of a log's end, in which a failure is looked for."""
OUT_OF_MEMORY = (b"CUDA out of memory", b"OutOfMemoryError")


def record(
    launch: Launch, outcome: Outcome, *, target: str, folder: Path, ledger: Path
) -> str | None:
    """Add a run that has ended to the ledger; what to warn of, where that failed."""
    if not outcome.ended:
        return None
    try:
        append_row(ledger, ledger_row(launch, outcome, target=target, folder=folder))
    except SpecError as error:
        return f"this run is not in the ledger: {error}"
    return None


def ledger_row(launch: Launch, outcome: Outcome, *, target: str, folder: Path) -> LedgerRow:
    """The row of one run. It holds no command, no variable and no list of hosts."""
    return _row(
        in_precision(launch.plan, outcome.measured.precision),
        outcome,
        plan_sha256=script_digest(launch.script),
        run_folder=os.path.relpath(outcome.run_folder, folder.resolve()),
        target=target,
        ended_at=datetime.now(UTC),
    )


def finished_row(run: FinishedRun, *, folder: Path, exit_code: int) -> LedgerRow:
    """The row of a run that was found in its folder."""
    outcome = Outcome(
        exit_code=exit_code,
        job_id=None,
        ended=True,
        seconds=None,
        run_folder=folder,
        measured=run.measured,
    )
    return _row(
        run.plan,
        outcome,
        plan_sha256=run.plan_sha256,
        run_folder=f"{folder.parent.name}/{folder.name}",
        target="folder",
        ended_at=datetime.fromtimestamp(run.metrics.stat().st_mtime, UTC),
    )


def _row(
    plan: Plan,
    outcome: Outcome,
    *,
    plan_sha256: str,
    run_folder: str,
    target: str,
    ended_at: datetime,
) -> LedgerRow:
    return LedgerRow(
        ended_at=ended_at.isoformat(timespec="seconds"),
        plan_sha256=plan_sha256,
        run_folder=run_folder,
        target=target,
        job=Workload(model=plan.model, training=plan.training, layout=plan.layout),
        machines=Machines.of(plan.cluster),
        predicted=_predicted(plan),
        observed=_observed(plan, outcome),
        versions=(("fsdpplan", __version__), *_versions(outcome.measured.summary)),
    )


def _predicted(plan: Plan) -> Predicted:
    estimate, learned = plan.estimate, plan.estimate.learned
    return Predicted(
        step_seconds=estimate.step_seconds,
        time=estimate.time,
        mfu_fraction=estimate.mfu_fraction,
        peak_allocated_bytes=estimate.memory.peak_allocated_bytes,
        peak_reserved_bytes=estimate.memory.peak_reserved_bytes,
        corrected_by_runs=0 if learned is None else learned.runs,
    )


def _observed(plan: Plan, outcome: Outcome) -> Observed:
    measured, summary = outcome.measured, outcome.measured.summary
    rows = compare(estimate=plan.estimate, measured=measured)
    values = {row.quantity: row.measured for row in rows}
    allocated, reserved = values["peak_allocated_bytes"], values.get("peak_reserved_bytes")
    return Observed(
        steps=len(measured.steps),
        measured_steps=measured.measured_steps,
        step_seconds=values["step_seconds"],
        tokens_per_second=values["tokens_per_second"],
        mfu_fraction=values["mfu_fraction"],
        peak_allocated_bytes=None if allocated is None else int(allocated),
        peak_reserved_bytes=None if reserved is None else int(reserved),
        memory_kind=None if summary is None else summary.memory_kind,
        exit_code=outcome.exit_code,
        failure=_failure(outcome),
        checkpoints=len(measured.checkpoints),
        checkpoint_seconds=measured.median_save("seconds"),
        checkpoint_blocking_seconds=measured.median_save("blocking_seconds"),
    )


def _failure(outcome: Outcome) -> Failure | None:
    if outcome.stopped is not None:
        return "stopped"
    if outcome.exit_code == 0:
        return None
    if ran_out_of_memory(outcome):
        return "out_of_memory"
    summary = outcome.measured.summary
    was_told = summary is not None and summary.stopped_by_signal is not None
    return "interrupted" if was_told or outcome.exit_code == INTERRUPTED else "failed"


def ran_out_of_memory(outcome: Outcome) -> bool:
    """Whether memory ran out, by the run's own event or, for another program, by its log."""
    if outcome.exit_code == 0:
        return False
    if outcome.measured.out_of_memory is not None:
        return True
    return outcome.log is not None and _says_out_of_memory(outcome.log)


def _says_out_of_memory(log: Path) -> bool:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_END_BYTES))
            end = file.read()
    except OSError:
        return False
    return any(words in end for words in OUT_OF_MEMORY)


def _versions(summary: Summary | None) -> list[tuple[str, str]]:
    if summary is None:
        return []
    found = {
        "torch": summary.torch_version,
        "nccl": summary.nccl_version,
        "driver": summary.driver_version,
    }
    return [(name, version) for name, version in found.items() if version is not None]
