"""Run a job script on this host: one process group, signals passed on, nothing left behind."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from fsdpplan.errors import LaunchError
from fsdpplan.run.follow.follow import Follower
from fsdpplan.run.follow.show import Display

RUN_ID = "FSDPPLAN_RUN_ID"
"""Variable by which a run's processes are known; torchrun puts its ranks in other sessions."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""Between TERM and KILL for what is left when the script has ended."""
STOP_SECONDS = 60.0
"""Between telling the script to stop and killing it; torchrun gives its ranks 30."""

_PR_SET_PDEATHSIG = 1


def run_here(
    *,
    script: Path,
    log: Path,
    folder: Path,
    environment: Mapping[str, str],
    follower: Follower,
    display: Display,
    run_id: str | None = None,
) -> int:
    """Run `script` by bash in `folder` until it ends; its exit code. Its processes are marked by
    `run_id`."""
    run_id = run_id or new_run_id()
    with _signals_passed_on(display) as signals:
        process = _start(
            script=script, log=log, folder=folder, environment=environment, run_id=run_id
        )
        try:
            signals.pass_to(process)
            _until_end(process, follower, display)
        finally:
            _end_leftovers(process, run_id)
            follower.poll(ended=True)
    return exit_code_of(process.returncode)


def new_run_id() -> str:
    """A mark that no other run has."""
    return uuid.uuid4().hex


def end_run(run_id: str) -> bool:
    """Ask the script of a run on this host to end, which ends its ranks; whether there was one.

    The script is the process with the mark whose parent has none: `fsdpplan run` itself.
    """
    marked = processes_of(run_id)
    roots = [pid for pid in marked if _parent(pid) not in marked]
    for pid in roots:
        _signal(pid, signal.SIGTERM)
    return bool(roots)


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _until_end(process: subprocess.Popen[bytes], follower: Follower, display: Display) -> None:
    """Wait for the script; end it as Ctrl-C would when the follower says that it has to."""
    patience = math.inf
    while process.poll() is None:
        follower.poll()
        if follower.verdict is not None and math.isinf(patience):
            display.state(f"ending the job: {follower.verdict}")
            process.send_signal(signal.SIGINT)
            patience = time.monotonic() + STOP_SECONDS
        if time.monotonic() > patience:
            _kill_group(process)
        time.sleep(POLL_SECONDS)


def exit_code_of(returncode: int) -> int:
    """A shell's exit code for what Popen says: 128 + n for an end by signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def _start(
    *, script: Path, log: Path, folder: Path, environment: Mapping[str, str], run_id: str
) -> subprocess.Popen[bytes]:
    bash = shutil.which("bash", path=environment.get("PATH"))
    if bash is None:
        raise LaunchError("there is no bash on PATH to run the job script with: install bash")
    with log.open("wb") as out:
        return subprocess.Popen(
            [bash, str(script)],
            cwd=folder,
            env={**environment, RUN_ID: run_id},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches this process only, which passes it on once.
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )


def _end_with_parent() -> Callable[[], None] | None:
    """Have the kernel send TERM to the script when this process dies, however it dies (Linux)."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    parent = os.getpid()

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(128 + signal.SIGTERM)

    return end_with_parent


class _Signals:
    """Passes signals to the script, which knows its ranks; a second Ctrl-C kills at once."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        """What came before there was a script."""
        self._interrupts = 0

    def hear(self, number: int, _frame: FrameType | None) -> None:
        """A signal's handler."""
        if self._process is None:
            self._early.append(number)
        else:
            self._pass_on(self._process, number)

    def pass_to(self, process: subprocess.Popen[bytes]) -> None:
        """Pass to `process` what has come and what comes."""
        self._process = process
        while self._early:
            self._pass_on(process, self._early.pop(0))

    def _pass_on(self, process: subprocess.Popen[bytes], number: int) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            _kill_group(process)
        elif process.poll() is None:
            if number != signal.SIGUSR1:
                self._display.state("stopping after this step; Ctrl-C once more kills the job")
            process.send_signal(number)


@contextmanager
def _signals_passed_on(display: Display) -> Iterator[_Signals]:
    """Hear signals from before the script is there until nothing of it is left: none is lost, and
    none ends this process while the script goes on."""
    signals = _Signals(display)
    before = {number: signal.signal(number, signals.hear) for number in PASSED_ON}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_leftovers(process: subprocess.Popen[bytes], run_id: str) -> None:
    """End whatever of this run outlived its script."""
    if process.poll() is None:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    number = signal.SIGTERM
    while left := processes_of(run_id):
        for pid in left:
            _signal(pid, number)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        time.sleep(POLL_SECONDS)
    process.wait()


def processes_of(run_id: str) -> list[int]:
    """Live processes that have this run's mark in their environment."""
    mark = f"{RUN_ID}={run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
