"""Submit a job script to Slurm and follow it to its end; no accounting database is needed."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fsdpplan.errors import LaunchError
from fsdpplan.run.follow import Follower
from fsdpplan.run.local import exit_code_of
from fsdpplan.run.show import Display

COMMAND_SECONDS = 60.0
"""No Slurm command should take longer; a busy controller takes seconds."""
LOOK_SECONDS = 0.5
"""Between looks at the job's files."""
FIRST_ASK_SECONDS, LAST_ASK_SECONDS = 1.0, 10.0
"""Between questions to the controller: often at first, then seldom."""
LOST_AFTER = 10
"""Questions in a row without an answer after which the controller counts as gone."""

GOING_ON = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "STAGE_OUT",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESIZING",
        "SIGNALING",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
    }
)
"""States after which another one comes. Source: squeue(1), job state codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What the controller says of a job."""

    state: str
    reason: str
    """Why it waits or ended, in Slurm's word."""
    exit_code: int
    """As a shell would give it: 128 + n for an end by signal n."""
    log: Path | None
    nodes: str
    """Slurm's list of its nodes, or (null)."""

    @property
    def ended(self) -> bool:
        return self.state not in GOING_ON

    @property
    def words(self) -> str:
        """For a person: RUNNING on node[1-2], PENDING (Resources)."""
        if self.state == "PENDING":
            return f"PENDING ({self.reason})"
        return f"{self.state} on {self.nodes}" if self.state == "RUNNING" else self.state


class Detached(Exception):
    """The person left; the job goes on."""


def submit(*, script: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Submit `script` from `folder`; the job's id."""
    # The environment carries where the metrics go, so it must reach the job whatever the site says.
    allowed = {**environment, "SBATCH_EXPORT": "ALL"}
    done = _slurm("sbatch", "--parsable", str(script), folder=folder, environment=allowed)
    if done.returncode:
        raise LaunchError(
            f"sbatch refused the job: {_one_line(done.stderr)}: change the job's options, such "
            "as --partition, --time or --sbatch, and type fsdpplan run again"
        )
    return done.stdout.strip().partition(";")[0]


def follow_job(
    job_id: str, *, environment: Mapping[str, str], follower: Follower, display: Display
) -> int:
    """Wait until the job has ended; its exit code. Raises Detached on Ctrl-C.

    A job that has to end in the follower's eyes is cancelled.
    """
    with _signals(job_id, environment):
        seen = ""
        for state in _answers(job_id, environment=environment, follower=follower, display=display):
            if state.words != seen:
                seen = state.words
                display.state(f"job {job_id}: {seen}")
            if state.log is not None:
                follower.follow_log(state.log)
            if state.ended:
                follower.poll(ended=True)
                return _exit_code(state)
    raise AssertionError("the answers end with the job")


def _answers(
    job_id: str, *, environment: Mapping[str, str], follower: Follower, display: Display
) -> Iterator[JobState]:
    """What the controller says, again and again; the job's files are looked at in between."""
    interval, silent, cancelled = FIRST_ASK_SECONDS, 0, False
    while True:
        state = ask(job_id, environment=environment)
        silent = silent + 1 if state is None else 0
        _require_answer(job_id, silent)
        if state is not None:
            yield state
        next_ask = time.monotonic() + interval
        interval = min(interval * 1.2, LAST_ASK_SECONDS)
        while time.monotonic() < next_ask:
            follower.poll()
            if follower.verdict is not None and not cancelled:
                cancelled = _cancel(job_id, environment=environment)
                if cancelled:
                    display.state(f"ending job {job_id}: {follower.verdict}")
            time.sleep(LOOK_SECONDS)


def _cancel(job_id: str, *, environment: Mapping[str, str]) -> bool:
    """End this one job; whether the controller took it."""
    try:
        return _slurm("scancel", job_id, environment=environment).returncode == 0
    except LaunchError:
        return False


@contextmanager
def _signals(job_id: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Ctrl-C leaves the job; USR1 is passed on to it."""

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        _slurm("scancel", "--batch", "--signal=USR1", job_id, environment=environment)

    before = [
        (signal.SIGINT, signal.signal(signal.SIGINT, _detach)),
        (signal.SIGUSR1, signal.signal(signal.SIGUSR1, pass_on)),
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def ask(job_id: str, *, environment: Mapping[str, str]) -> JobState | None:
    """The job's state from the controller, or None when it gives no answer now."""
    try:
        done = _slurm("scontrol", "show", "job", job_id, environment=environment)
    except LaunchError:
        return None
    return parse_job(done.stdout) if done.returncode == 0 else None


def parse_job(text: str) -> JobState | None:
    """The state in what `scontrol show job ID` prints.

    Only keys at the beginning of a line, or behind one that has no free text, are read: the name
    of a job may look like any of them.
    """
    state = re.search(r"^ +JobState=(\S+) Reason=(\S+)", text, re.MULTILINE)
    code = re.search(r"^ +Requeue=\d+ .*ExitCode=(\d+):(\d+)", text, re.MULTILINE)
    if state is None or code is None:
        return None
    log = re.search(r"^ +StdOut=(.+)$", text, re.MULTILINE)
    nodes = re.search(r"^ +NodeList=(\S+)", text, re.MULTILINE)
    by_signal = int(code[2])
    return JobState(
        state=state[1],
        reason=state[2],
        exit_code=exit_code_of(-by_signal) if by_signal else int(code[1]),
        log=Path(log[1].rstrip()) if log else None,
        nodes=nodes[1] if nodes else "(null)",
    )


def _exit_code(state: JobState) -> int:
    """Never 0 for a job that did not complete, whatever its last program said."""
    return state.exit_code if state.state == "COMPLETED" else state.exit_code or 1


def _require_answer(job_id: str, silent: int) -> None:
    if silent >= LOST_AFTER:
        raise LaunchError(
            f"the Slurm controller has not told of job {job_id} for a while, or has forgotten it: "
            f"ask it by scontrol show job {job_id}, or sacct -j {job_id}"
        )


def _detach(_number: int, _frame: FrameType | None) -> None:
    raise Detached


def _slurm(
    *command: str, environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(f"{command[0]} is not on PATH: go to a node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command[0]} gave no answer in {COMMAND_SECONDS:.0f} s: the controller may be down"
        ) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500] or "no reason given"
