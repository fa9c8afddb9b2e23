"""Follow jobs of an engine to their end, or until the person leaves."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from fsdpplan.errors import LaunchError, SpecError
from fsdpplan.run.engines.engine import Engine, JobState
from fsdpplan.run.follow.follow import Follower
from fsdpplan.run.follow.show import Display
from fsdpplan.spec.nodes import expand_host_list

LOOK_SECONDS = 0.5
"""Between looks at the job's files."""
LOG_SECONDS = 2.0
"""Between questions for the log, where it is no file."""
FIRST_ASK_SECONDS, LAST_ASK_SECONDS = 1.0, 10.0
"""Between questions to the engine: often at first, then seldom."""
LOST_AFTER = 10
"""Questions in a row without an answer after which the engine counts as gone."""

GOES_ON_AFTER = frozenset({"COMPLETED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
"""States after which the next job of a chain has something to do; other ends would come again."""

LEAVES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How following came to its end."""

    exit_code: int
    """The job's own, or 128 + n where signal n ended the following."""
    ended: bool
    """False: the person left, and the job goes on."""
    job_id: str
    """The one that was followed last."""
    state: JobState | None
    """The last one seen."""


class Asked:
    """What signals have asked for."""

    def __init__(self) -> None:
        self.leave: int | None = None
        """Number of the signal."""
        self.save = False
        """USR1 came: the job is to save and leave."""
        self.waits = False
        """The job is being cancelled: a second signal must not come between."""

    def hear(self, number: int, _frame: FrameType | None) -> None:
        """A signal's handler; a second signal to leave raises KeyboardInterrupt."""
        if number == signal.SIGUSR1:
            self.save = True
        elif self.waits:
            return
        elif self.leave is not None:
            raise KeyboardInterrupt  # twice: leave at once
        else:
            self.leave = number


def follow_jobs(
    engine: Engine,
    jobs: Sequence[str],
    *,
    follower: Follower,
    display: Display,
    asked: Asked,
    cancel_on_exit: bool = False,
) -> End:
    """Wait until the last of `jobs`, which come one after the other, has ended.

    Ctrl-C, TERM and HUP leave them running, unless `cancel_on_exit` or the person says otherwise;
    USR1 is passed on. Jobs that have to end in the follower's eyes are cancelled, and so are those
    of a chain that have nothing more to do.
    """
    watched = _Watched(engine, follower, display, asked, cancel_on_exit=cancel_on_exit)
    for number, job_id in enumerate(jobs):
        rest = jobs[number + 1 :]
        try:
            end = watched.to_end(job_id, rest)
        except KeyboardInterrupt:
            watched.say_how_it_goes_on(job_id)
            raise
        if not rest or end.state is None or not end.ended or asked.leave is not None:
            return end
        is_complete = follower.measured.is_complete
        if is_complete or follower.verdict is not None or end.state.state not in GOES_ON_AFTER:
            why = "all steps are done" if is_complete else f"job {job_id} ended: {end.state.state}"
            return _end_of_chain(engine, end, rest, follower=follower, display=display, why=why)
    raise AssertionError("there is at least one job")


class _Watched:
    """One job after the other."""

    def __init__(
        self,
        engine: Engine,
        follower: Follower,
        display: Display,
        asked: Asked,
        *,
        cancel_on_exit: bool,
    ) -> None:
        self._engine = engine
        self._follower = follower
        self._display = display
        self._asked = asked
        self._cancel_on_exit = cancel_on_exit
        self._cancelled = False

    def to_end(self, job_id: str, rest: Sequence[str]) -> End:
        """Follow one job; `rest` come after it."""
        seen: object = None
        last: JobState | None = None
        for state in self._answers(job_id):
            if state is not None:
                self._look_at(job_id, state)
                if _news(state) != seen:
                    seen = _news(state)
                    self._display.state(f"job {job_id}: {_words(state)}")
                    self._name_tasks(state)
                last = state
                if state.ended:
                    number = self._asked.leave if self._cancelled else None
                    code = state.shell_code if number is None else 128 + number
                    return End(exit_code=code, ended=True, job_id=job_id, state=state)
            elif self._leaves(job_id, rest):
                assert self._asked.leave is not None
                self.say_how_it_goes_on(job_id)
                code = 128 + self._asked.leave
                return End(exit_code=code, ended=False, job_id=job_id, state=last)
        raise AssertionError("the answers end with the job")

    def _look_at(self, job_id: str, state: JobState) -> None:
        """Find the job's output, and show the rest of it where the job has ended."""
        if state.log is not None:
            # A log that has the job's id in its name is its own from the first line.
            self._follower.follow_log(state.log, from_start=job_id in state.log.name)
        if state.ended:
            if not self._follower.hosts:
                self._name_tasks(state)
            self._follower.show(self._engine.log_lines(job_id))
            self._follower.poll(ended=True)

    def _name_tasks(self, state: JobState) -> None:
        """Of srun's tasks the n-th is on the n-th node; pods say who they are."""
        if self._engine.name == "slurm" and (hosts := hosts_in(state.nodes)):
            self._follower.hosts = hosts

    def _answers(self, job_id: str) -> Iterator[JobState | None]:
        """What the engine says, again and again; None where somebody asks to leave. The job's
        files are looked at in between."""
        interval, silent = FIRST_ASK_SECONDS, 0
        while True:
            state = self._engine.state(job_id)
            silent = silent + 1 if state is None else 0
            _require_answer(self._engine, job_id, silent)
            if state is not None:
                yield state
            next_ask = time.monotonic() + interval
            interval = min(interval * 1.2, LAST_ASK_SECONDS)
            next_log = time.monotonic()
            while time.monotonic() < next_ask:
                self._follower.poll()
                if time.monotonic() >= next_log:
                    self._follower.show(self._engine.log_lines(job_id))
                    next_log = time.monotonic() + LOG_SECONDS
                if self._obeys(job_id):
                    yield None
                if self._soon_over():
                    interval = FIRST_ASK_SECONDS
                    next_ask = min(next_ask, time.monotonic() + interval)
                time.sleep(LOOK_SECONDS)

    def _soon_over(self) -> bool:
        return self._follower.complaint is not None or self._follower.measured.summary is not None

    def _obeys(self, job_id: str) -> bool:
        """Do what signals and the follower ask for; whether somebody wants to leave."""
        if self._asked.save:
            self._asked.save = False
            self._engine.save_and_leave(job_id)
        verdict = self._follower.verdict
        if verdict is not None and not self._cancelled:
            self._cancelled = self._engine.cancel(job_id)
            if self._cancelled:
                self._display.state(f"ending job {job_id}: {verdict}")
        return self._asked.leave is not None and not self._cancelled

    def _leaves(self, job_id: str, rest: Sequence[str]) -> bool:
        """Whether the job goes on without us; else it is cancelled."""
        cancels = self._cancel_on_exit or (
            self._asked.leave == signal.SIGINT
            and not self._display.confirms(f"leave job {job_id} running?")
        )
        if not cancels:
            return True
        self._asked.waits = True
        self._cancelled = all([self._engine.cancel(each) for each in (*reversed(rest), job_id)])
        self._asked.waits = False
        if not self._cancelled:
            self._display.state(f"job {job_id} could not be cancelled: type fsdpplan cancel")
            return True
        self._display.state(f"cancelled job {', '.join((job_id, *rest))}")
        return False

    def say_how_it_goes_on(self, job_id: str) -> None:
        """Last words to who leaves."""
        if self._cancelled:
            return
        self._display.state(
            f"job {job_id} goes on without you: fsdpplan run --attach comes back to it, fsdpplan "
            f"cancel --job {job_id} ends it"
        )


def _news(state: JobState) -> object:
    """What is worth a line when it changes: the expected start does so all the time."""
    return state.state, state.reason, state.nodes, state.restarts


def _words(state: JobState) -> str:
    start = f", expected to start {state.expected_start}" if state.expected_start else ""
    again = f", started again {state.restarts}x" if state.restarts and not state.ended else ""
    return f"{state.words}{start}{again}"


def hosts_in(nodes: str) -> tuple[str, ...]:
    """Names of the tasks of a job with one task a node, as long as its script does not say which
    nodes it took; nothing for a single one, which has no labels."""
    try:
        hosts = expand_host_list(nodes)
    except SpecError:
        return ()
    return hosts if len(hosts) > 1 else ()


def _end_of_chain(
    engine: Engine,
    end: End,
    rest: Sequence[str],
    *,
    follower: Follower,
    display: Display,
    why: str,
) -> End:
    """How a chain ended of which a job leaves the others nothing to do.

    Somebody may have cancelled one job while the next trained on, or after the last step was saved:
    then the chain has done what it was for, whatever its first job was told.
    """
    was_cancelled = end.state is not None and end.state.state == "CANCELLED"
    for job_id in rest if was_cancelled else ():
        state = engine.state(job_id)
        if state is not None and state.succeeded:
            return End(exit_code=0, ended=True, job_id=job_id, state=state)
    _cancel_rest(engine, rest, display, why=why)
    concluded = follower.measured.is_complete and follower.measured.summary is not None
    return replace(end, exit_code=0) if was_cancelled and concluded else end


def _cancel_rest(engine: Engine, rest: Sequence[str], display: Display, *, why: str) -> None:
    """The last one first: none of them may start because the one before it is gone."""
    if all([engine.cancel(job_id) for job_id in reversed(rest)]):
        display.state(f"cancelled job {', '.join(rest)} of the chain: {why}")


def _require_answer(engine: Engine, job_id: str, silent: int) -> None:
    if silent >= LOST_AFTER:
        raise LaunchError(
            f"{engine.name} has not told of job {job_id} for a while; the job may go on: type "
            "fsdpplan run --attach when it answers again"
        )


@contextmanager
def listening() -> Iterator[Asked]:
    """Signals to leave and to save are heard, and end nothing by themselves."""
    asked = Asked()
    before = {number: signal.signal(number, asked.hear) for number in (*LEAVES, signal.SIGUSR1)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
