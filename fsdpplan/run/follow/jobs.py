"""The runs of a folder: which there are, how each stands, which one is meant."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fsdpplan.emit.folder import SCRIPT_NAME
from fsdpplan.emit.slurm.header import MAX_SCRIPT_BYTES, read_metrics_path, script_digest
from fsdpplan.errors import FsdpPlanError, SpecError
from fsdpplan.files.job_records import (
    Ending,
    EngineName,
    RunRecord,
    read_record,
    write_record,
)
from fsdpplan.files.table import text_of
from fsdpplan.run.engines.engine import Engine, Forgotten, JobState
from fsdpplan.run.engines.local import processes_of
from fsdpplan.run.engines.slurm import Slurm, require_plain_id
from fsdpplan.run.follow.attempts import ended_for_good
from fsdpplan.run.follow.metrics import Measured, read_ends

RUNS_FOLDER = "fsdpplan-runs"
"""Beside the plan: one folder a run, with the script, its log and its metrics."""
METRICS_NAME = "metrics.jsonl"
CANCELLED = Ending(state="CANCELLED", exit_code=143)
LOST = "LOST"
"""State of a run that ended when nobody could write down how."""
_SUBMITTED_BARE = "job-"
"""Begins the folder of a job that somebody submitted by sbatch itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run, and where its files are."""

    run_folder: Path
    record: RunRecord

    @property
    def shown_id(self) -> str:
        """What a person calls it: the newest job's id, or the folder's name."""
        if self.record.engine == "here" or not self.record.jobs:
            return self.run_folder.name
        return self.record.jobs[-1] if len(self.record.jobs) == 1 else "-".join(self._ends)

    @property
    def _ends(self) -> tuple[str, str]:
        return self.record.jobs[0], self.record.jobs[-1]

    def is_called(self, name: str) -> bool:
        """Whether `name` is one of its ids."""
        known = (*self.record.jobs, *self.record.earlier, self.run_folder.name, self.shown_id)
        return name in known

    @property
    def measured(self) -> Measured:
        """What it has reported: its newest start."""
        return read_ends(Path(self.record.metrics))


def runs_of(folder: Path) -> list[RecordedRun]:
    """The runs of `folder` whose records can be read, the newest first."""
    found = []
    for run_folder in sorted((folder / RUNS_FOLDER).glob("*")):
        if not run_folder.is_dir():
            continue
        try:
            record = read_record(run_folder) or _bare(run_folder.resolve(), folder.resolve())
        except SpecError:
            continue
        if record is not None:
            found.append(RecordedRun(run_folder=run_folder.resolve(), record=record))
    return sorted(found, key=lambda run: (run.record.submitted_at, run.run_folder.name))[::-1]


def unreadable_runs(folder: Path) -> tuple[str, ...]:
    """What is wrong with each record that cannot be read."""
    wrong = []
    for run_folder in sorted((folder / RUNS_FOLDER).glob("*")):
        try:
            read_record(run_folder)
        except SpecError as error:
            wrong.append(f"{error}; where that run has ended, remove its folder")
    return tuple(wrong)


def chosen_run(folder: Path, job: str | None) -> RecordedRun:
    """The run that `job` names, or the newest one. Raises SpecError where there is none."""
    runs, wrong = runs_of(folder), unreadable_runs(folder)
    if wrong and job is None:
        raise SpecError(f"{wrong[0]}, or name another run by --job")
    if not runs:
        raise SpecError(
            f"nothing was launched from {folder}: type fsdpplan run first, or go to the folder "
            "that you launched from"
        )
    if job is None:
        return runs[0]
    named = next((run for run in runs if run.is_called(require_plain_id(job))), None)
    if named is None:
        known = ", ".join(run.shown_id for run in runs[:5])
        raise SpecError(f"no run of this folder is called {job!r}: name one of {known}")
    return named


def _bare(run_folder: Path, folder: Path) -> RunRecord | None:
    """The record of a job that was submitted by sbatch itself; it has left a folder only."""
    job_id = run_folder.name.removeprefix(_SUBMITTED_BARE)
    if not run_folder.name.startswith(_SUBMITTED_BARE) or not job_id.isdecimal():
        return None
    script = next(
        (place / SCRIPT_NAME for place in (run_folder, folder) if (place / SCRIPT_NAME).is_file()),
        folder / SCRIPT_NAME,
    )
    text = text_of(script, limit_bytes=MAX_SCRIPT_BYTES)
    own = read_metrics_path(text)
    return RunRecord(
        engine="slurm",
        jobs=(job_id,),
        folder=str(folder),
        script=str(script),
        plan_sha256=script_digest(text),
        metrics=str(run_folder / METRICS_NAME if own is None else folder / own),
        submitted_at=_made_at(run_folder),
    )


def _made_at(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")


def engine_of(name: EngineName) -> Engine:
    """The engine of that name. Raises LaunchError where its commands are not here."""
    if name == "kubernetes":
        from fsdpplan.run.engines.kubernetes import Kubernetes

        return Kubernetes()
    return Slurm()


def state_of(run: RecordedRun) -> JobState | None:
    """How the run stands; None where nobody can say now. An end is written down."""
    record = run.record
    if record.ending is not None:
        return _ended(record.ending)
    if record.engine == "here":
        return _state_here(run)
    try:
        state = _newest_state(engine_of(record.engine), record.jobs)
    except Forgotten:
        state = _as_its_files_say(run)
    if state is not None and state.ended:
        remember_end(run, state, state.shell_code)
    return state


def current_job(engine: Engine, jobs: tuple[str, ...]) -> str:
    """The first job of a chain that has not ended, else its last."""
    for job_id in jobs[:-1]:
        state = engine.state(job_id)
        if state is None or not state.ended:
            return job_id
    return jobs[-1]


def remember_end(run: RecordedRun, state: JobState | None, exit_code: int) -> None:
    """Write down how the run ended; that it cannot be written is no reason to fail."""
    word = LOST if state is None else state.state
    log = str(state.log) if state is not None and state.log is not None else run.record.log
    ending = Ending(state=word, exit_code=exit_code)
    try:
        write_record(run.run_folder, replace(run.record, ending=ending, log=log))
    except FsdpPlanError:
        return


def is_in_ledger(run_folder: Path) -> bool:
    """Whether somebody has added the run to the ledger."""
    record = read_record(run_folder)
    return record is not None and record.in_ledger


def remember_in_ledger(run_folder: Path) -> None:
    """Write down that the run is in the ledger."""
    record = read_record(run_folder)
    if record is not None:
        write_record(run_folder, replace(record, in_ledger=True))


def remember_cancelled(run: RecordedRun) -> None:
    """Write down that somebody has cancelled the run."""
    record = read_record(run.run_folder) or run.record
    write_record(run.run_folder, replace(record, is_cancelled=True))


def _newest_state(engine: Engine, jobs: tuple[str, ...]) -> JobState | None:
    if not jobs:
        return None
    last: JobState | None = None
    for job_id in jobs:
        last = engine.state(job_id)
        if last is None or not last.ended:
            return last
    return last


def _state_here(run: RecordedRun) -> JobState | None:
    """A run on this host lives as long as its processes."""
    record = run.record
    if record.host != socket.gethostname():
        return None
    if any(processes_of(mark) for mark in record.jobs):
        return JobState(
            state="RUNNING",
            ended=False,
            succeeded=False,
            reason="",
            exit_code=0,
            nodes=record.host,
            log=Path(record.log) if record.log else None,
        )
    return _as_its_files_say(run)


def _as_its_files_say(run: RecordedRun) -> JobState:
    """Nobody else knows how the run ended: a complete one says so itself, and a job's script why
    it gave up."""
    if run.record.is_cancelled:
        return _ended(CANCELLED)
    last = ended_for_good(run.run_folder)
    done = run.measured.is_complete and (last is None or last.exit_code == 0)
    code = 0 if done else (last.exit_code if last is not None else 0) or 1
    why = "it ended when nobody followed it, and nobody knows how" if last is None else last.reason
    return JobState(
        state="COMPLETED" if done else LOST if last is None else "FAILED",
        ended=True,
        succeeded=done,
        reason="" if done else why,
        exit_code=code,
        nodes="",
        log=Path(run.record.log) if run.record.log else None,
    )


def _ended(ending: Ending) -> JobState:
    return JobState(
        state=ending.state,
        ended=True,
        succeeded=ending.exit_code == 0,
        reason="",
        exit_code=ending.exit_code,
        nodes="",
    )
