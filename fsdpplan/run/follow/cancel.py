"""End runs of a folder."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.errors import LaunchError
from fsdpplan.run.engines.local import end_run
from fsdpplan.run.follow.jobs import RecordedRun, engine_of, remember_cancelled, state_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """What came of it."""

    run_id: str
    jobs: tuple[str, ...]
    """Told to end; none where it had ended."""
    words: str


def goes_on(run: RecordedRun) -> bool:
    """Whether there is anything to cancel, or nobody can say."""
    state = state_of(run)
    return state is None or not state.ended


def cancel_run(run: RecordedRun) -> Cancelled:
    """End a run with all its jobs. Raises LaunchError where its engine refuses."""
    state = state_of(run)
    if state is not None and state.ended:
        return Cancelled(
            run_id=run.shown_id, jobs=(), words=f"run {run.shown_id} has ended: {state.words}"
        )
    record = run.record
    if record.engine == "here":
        if state is None or not any([end_run(mark) for mark in record.jobs]):
            raise LaunchError(
                f"run {run.shown_id} is on {record.host}: type fsdpplan cancel there, as the one "
                "who started it"
            )
        return Cancelled(
            run_id=run.shown_id,
            jobs=record.jobs,
            words=f"told run {run.shown_id} on this host to end",
        )
    engine = engine_of(record.engine)
    # The last one of a chain first: none may start because the one before it is gone.
    kept = [job_id for job_id in reversed(record.jobs) if not engine.cancel(job_id)]
    if kept and not _all_ended(run):
        raise LaunchError(
            f"{engine.name} did not cancel job {', '.join(reversed(kept))}: see by fsdpplan "
            "status how it stands, and whether it is yours"
        )
    remember_cancelled(run)
    return Cancelled(
        run_id=run.shown_id, jobs=record.jobs, words=f"cancelled job {', '.join(record.jobs)}"
    )


def _all_ended(run: RecordedRun) -> bool:
    """A job that has ended in the meantime refuses, too."""
    state = state_of(run)
    return state is not None and state.ended
