"""A run while it is followed: on this host, or as jobs of an engine."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fsdpplan.errors import FsdpPlanError, LaunchError
from fsdpplan.files.job_records import RunRecord, write_record
from fsdpplan.run.engines.engine import Engine, JobState
from fsdpplan.run.engines.local import new_run_id, run_here
from fsdpplan.run.engines.machine import Target
from fsdpplan.run.follow.follow import Follower
from fsdpplan.run.follow.jobs import RecordedRun, current_job, engine_of, remember_end, state_of
from fsdpplan.run.follow.nccl_watch import ALLOWS_SOCKETS, NcclWatch, nccl_variables, uses_nccl
from fsdpplan.run.follow.show import Display
from fsdpplan.run.follow.watch import Asked, follow_jobs, listening
from fsdpplan.run.launch import Launch
from fsdpplan.run.outcome import Manner, Outcome


class UnderWay:
    """A run while it is followed."""

    def __init__(self, run: RecordedRun, launch: Launch, display: Display, manner: Manner) -> None:
        self._run = run
        self._launch = launch
        self._display = display
        self._manner = manner
        self._began: float | None = time.monotonic()
        self._watch = (
            NcclWatch(folder=run.run_folder, plan=launch.plan, allow_sockets=manner.allow_sockets)
            if uses_nccl(launch.plan)
            else None
        )

    def start(self, said: str, target: Target) -> Outcome:
        """Start it, follow it, and say what it came to."""
        follower = self._follower(from_start=False)
        with self._display:
            self._display.state(said)
            if self._run.record.engine == "here":
                return self._here(follower, target)
            engine = engine_of(self._run.record.engine)
            with listening() as asked:
                self._submit(engine)
                return self._followed(engine, follower, asked)

    def attach(self) -> Outcome:
        """Follow it from where it is."""
        submitted = datetime.fromisoformat(self._run.record.submitted_at)
        self._began = time.monotonic() - (datetime.now(UTC) - submitted).total_seconds()
        follower = self._follower(from_start=True)
        with self._display:
            state = state_of(self._run)
            if state is not None and state.ended:
                return self._looked_at(state, follower)
            if self._run.record.engine == "here":
                raise LaunchError(
                    f"run {self._run.shown_id} goes on on {self._run.record.host}, where another "
                    "fsdpplan run follows it: fsdpplan logs --follow shows what it prints"
                )
            engine = engine_of(self._run.record.engine)
            with listening() as asked:
                return self._followed(engine, follower, asked)

    def _follower(self, *, from_start: bool) -> Follower:
        return Follower(
            metrics=Path(self._run.record.metrics),
            display=self._display,
            nccl=self._watch,
            run_folder=self._run.run_folder,
            from_start=from_start,
            # Pods share no folder with this machine; what has ended may be gone from there.
            collects=self._run.record.engine == "kubernetes" and self._run.record.ending is None,
        )

    def _environment(self, target: Target) -> dict[str, str]:
        run_folder = self._run.run_folder
        environment = _environment(target, Path(self._run.record.metrics), run_folder)
        if self._watch is not None:
            # It is judged here, by the logs of all nodes.
            environment[ALLOWS_SOCKETS] = "1"
            environment |= nccl_variables(
                script=self._launch.script, environment=environment, folder=run_folder
            )
        return environment

    def _here(self, follower: Follower, target: Target) -> Outcome:
        record, log = self._run.record, self._run.run_folder / "job.log"
        log.touch()
        follower.follow_log(log)
        mark = new_run_id()
        self._remember(replace(record, jobs=(mark,), log=str(log)))
        exit_code = run_here(
            script=Path(record.script),
            log=log,
            folder=Path(record.folder),
            environment=self._environment(target),
            follower=follower,
            display=self._display,
            run_id=mark,
        )
        return self._ended(None, exit_code, follower, job_id=None)

    def _submit(self, engine: Engine) -> None:
        """Submit the job, or a chain of them; each is remembered at once."""
        target: Target = "slurm" if engine.name == "slurm" else "kubernetes"
        environment, record = self._environment(target), self._run.record
        jobs: list[str] = []
        for _ in range(self._manner.chain):
            try:
                job_id = engine.submit(
                    script=Path(record.script),
                    folder=Path(record.folder),
                    environment=environment,
                    after=jobs[-1] if jobs else None,
                )
            except LaunchError as error:
                if not jobs:
                    raise
                for each in reversed(jobs):
                    engine.cancel(each)
                raise LaunchError(
                    f"of a chain of {self._manner.chain} jobs the first {len(jobs)} were submitted "
                    f"and are cancelled again: {error}; see to that, and type fsdpplan run again"
                ) from error
            jobs.append(job_id)
            try:
                self._remember(replace(record, jobs=tuple(jobs)))
            except FsdpPlanError:
                # A job that nobody could find again: on a full disk it would not get far either.
                for each in reversed(jobs):
                    engine.cancel(each)
                raise
        of = "" if len(jobs) == 1 else f", then {', '.join(jobs[1:])}"
        self._display.state(f"submitted as job {jobs[0]}{of}")

    def _followed(self, engine: Engine, follower: Follower, asked: Asked) -> Outcome:
        jobs = self._run.record.jobs
        if not jobs:
            raise LaunchError(f"{self._run.run_folder} has no job: type fsdpplan run --resume")
        current = jobs.index(current_job(engine, jobs))
        end = follow_jobs(
            engine,
            jobs[current:],
            follower=follower,
            display=self._display,
            asked=asked,
            cancel_on_exit=self._manner.cancel_on_exit,
        )
        if not end.ended:
            return self._outcome(end.exit_code, follower, job_id=end.job_id, ended=False)
        return self._ended(end.state, end.exit_code, follower, job_id=end.job_id)

    def _looked_at(self, state: JobState, follower: Follower) -> Outcome:
        """A run that is over: nothing is shown but what it came to."""
        record = self._run.record
        log = state.log or (Path(record.log) if record.log else None)
        self._began = None
        self._display.state(f"run {self._run.shown_id} has ended: {state.words}")
        if log is not None:
            follower.hear_log(log)
        follower.poll(ended=True)
        job_id = record.jobs[-1] if record.jobs and record.engine != "here" else None
        return self._outcome(state.shell_code, follower, job_id=job_id, ended=True)

    def _ended(
        self, state: JobState | None, exit_code: int, follower: Follower, *, job_id: str | None
    ) -> Outcome:
        stopped = follower.verdict
        code = exit_code if stopped is None else LaunchError.exit_code
        remember_end(self._run, state or _state_of_code(code), code)
        return self._outcome(code, follower, job_id=job_id, ended=True, stopped=stopped)

    def _outcome(
        self,
        exit_code: int,
        follower: Follower,
        *,
        job_id: str | None,
        ended: bool,
        stopped: str | None = None,
    ) -> Outcome:
        watch = self._watch
        return Outcome(
            exit_code=exit_code,
            job_id=job_id,
            ended=ended,
            seconds=None if self._began is None else time.monotonic() - self._began,
            run_folder=self._run.run_folder,
            measured=follower.measured,
            nccl=None if watch is None else watch.report,
            warnings=() if watch is None else watch.warnings,
            stopped=stopped,
            complaint=follower.complaint,
            log=follower.log,
            steps=follower.steps_done,
        )

    def _remember(self, record: RunRecord) -> None:
        self._run = replace(self._run, record=record)
        write_record(self._run.run_folder, record)


def _state_of_code(code: int) -> JobState:
    """Of a run on this host, in words like an engine's."""
    return JobState(
        state="COMPLETED" if code == 0 else "FAILED",
        ended=True,
        succeeded=code == 0,
        reason="",
        exit_code=code,
        nodes="",
    )


def _environment(target: Target, metrics: Path, run_folder: Path) -> dict[str, str]:
    """This process's own; without an allocation's variables for a run on this host alone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if target != "here" or not name.startswith("SLURM_")
    }
    return {**kept, "FSDPPLAN_METRICS": str(metrics), "FSDPPLAN_RUN_FOLDER": str(run_folder)}
