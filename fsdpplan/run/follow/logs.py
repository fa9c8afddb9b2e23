"""What the ranks of a run have printed, on all nodes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.run.engines.engine import Engine, Forgotten, JobState
from fsdpplan.run.follow.attempts import AttemptsTail, StartedOn
from fsdpplan.run.follow.follow import with_host
from fsdpplan.run.follow.jobs import RecordedRun, engine_of, state_of
from fsdpplan.run.follow.tail import FileTail
from fsdpplan.run.follow.watch import LOOK_SECONDS, hosts_in

ASK_SECONDS = 10.0
"""Between questions whether the job goes on."""


@dataclass(kw_only=True)
class JobLog:
    """The output of one job of a run, read as it grows."""

    run: RecordedRun
    job_id: str | None
    """None: the run has no engine but this host."""
    path: Path | None
    """None: the output is no file."""
    engine: Engine | None
    hosts: tuple[str, ...]
    """Of the tasks of a job on several nodes."""
    _tail: FileTail | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._tail = None if self.path is None else FileTail(self.path, from_start=True)

    def poll(self) -> list[str]:
        """Lines since the last call, each with its host's name where that is known."""
        if self._tail is not None:
            lines = self._tail.poll()
        elif self.engine is not None and self.job_id is not None:
            lines = self.engine.log_lines(self.job_id)
        else:
            lines = []
        return [with_host(line, self.hosts) for line in lines]

    def rest(self) -> list[str]:
        """The same, with an unfinished last line."""
        if self._tail is None:
            return self.poll()
        return [with_host(line, self.hosts) for line in self._tail.rest()]


def job_log(run: RecordedRun, job: str | None) -> JobLog:
    """The output of `run`, of its job `job` where that is one of several. Raises SpecError where
    there is none yet."""
    record = run.record
    if record.engine == "here":
        return JobLog(run=run, job_id=None, path=_existing(run), engine=None, hosts=())
    job_id = job if job in (*record.jobs, *record.earlier) else None
    engine = engine_of(record.engine)
    if job_id is None:
        job_id = _newest_started(engine, record.jobs)
    state = _state(engine, job_id)
    if record.engine == "kubernetes":
        return JobLog(run=run, job_id=job_id, path=None, engine=engine, hosts=())
    path = state.log if state is not None else None
    path = path or _existing(run, job_id)
    if not os.path.exists(path):
        words = "is not there yet" if state is None else f"is {state.words}"
        raise SpecError(
            f"job {job_id} {words}, and has printed nothing to {path}: fsdpplan status shows how "
            "it stands"
        )
    return JobLog(run=run, job_id=job_id, path=path, engine=engine, hosts=_hosts(run, state))


def lines_of(log: JobLog, *, node: str | None, tail: int | None, follow: bool) -> Iterator[str]:
    """The lines of one node or of all, the last `tail` of what is there, and what is added until
    the run has ended where `follow` says so."""
    if node is not None and node not in log.hosts:
        known = ", ".join(log.hosts) or "none: its lines do not say which node they are from"
        raise SpecError(
            f"the job has no node {node!r}; name one that it has ({known}), or leave --node out"
        )
    there = log.poll() if follow else log.rest()
    yield from deque(_of_node(there, node), maxlen=tail)
    next_ask = time.monotonic()
    while follow:
        ended = False
        if time.monotonic() >= next_ask:
            state = state_of(log.run)
            ended = state is not None and state.ended
            next_ask = time.monotonic() + ASK_SECONDS
        yield from _of_node(log.rest() if ended else log.poll(), node)
        if ended:
            return
        time.sleep(LOOK_SECONDS)


def _of_node(lines: Iterable[str], node: str | None) -> Iterator[str]:
    return (line for line in lines if node is None or line.startswith(f"{node}: "))


def _newest_started(engine: Engine, jobs: tuple[str, ...]) -> str:
    """The last job of a chain that has been somewhere."""
    for job_id in reversed(jobs[1:]):
        state = _state(engine, job_id)
        if state is not None and (state.nodes or state.ended) and state.state != "PENDING":
            return job_id
    return jobs[0]


def _state(engine: Engine, job_id: str) -> JobState | None:
    try:
        return engine.state(job_id)
    except Forgotten:
        return None


def _existing(run: RecordedRun, job_id: str | None = None) -> Path:
    """Where the output is when nobody tells: remembered, or under the script's own name for it."""
    if run.record.log and (job_id is None or job_id in Path(run.record.log).name):
        return Path(run.record.log)
    if job_id is None:
        return run.run_folder / "job.log"
    return Path(run.record.folder) / f"fsdpplan-{job_id}.out"


def _hosts(run: RecordedRun, state: JobState | None) -> tuple[str, ...]:
    """Of the newest start; where starts took different nodes, numbers would be given wrong
    names."""
    events = AttemptsTail(run.run_folder).poll()
    starts = [event.nodes for event in events if isinstance(event, StartedOn)]
    if starts:
        return starts[-1] if len(set(starts)) == 1 and len(starts[-1]) > 1 else ()
    return () if state is None else hosts_in(state.nodes)
