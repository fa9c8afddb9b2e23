"""Start the measuring program as `calibrate` does, by torchrun on gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.spec.measurement import MeasuredCall, Measurement

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("-m", "fsdpplan.topology.measure")
TIMEOUT_SECONDS = 120
SECONDS = (5, 20, 80)
"""What a measurement is given, one after the other."""


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def start(log: Path, *arguments: str, processes: int = 0) -> subprocess.Popen[str]:
    """The program under torchrun, or without it for 0 processes."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    launcher = (*torchrun, f"--nproc-per-node={processes}") if processes else ()
    return subprocess.Popen(
        [sys.executable, *launcher, *PROGRAM, "--out", str(log), *arguments],
        env=environment(),
        cwd=log.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for its end and return what it said."""
    try:
        _, said = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    return said


def measured(
    log: Path,
    *arguments: str,
    processes: int = 0,
    enough: Callable[[Sequence[Measurement]], bool] = bool,
) -> tuple[Measurement, ...]:
    """The rows of a whole measurement. A busy machine that has no time for `enough` of them is
    given more, up to sixteen times as much."""
    for seconds in SECONDS:
        log.unlink(missing_ok=True)
        process = start(log, *arguments, "--seconds", str(seconds), processes=processes)
        said = finish(process)
        assert process.returncode == 0, said[-4000:]
        rows = read_measurements(log)
        if enough(rows):
            break
    return rows


def calls(rows: Sequence[Measurement]) -> list[MeasuredCall]:
    return [row for row in rows if isinstance(row, MeasuredCall)]


def wait_for_lines(process: subprocess.Popen[str], log: Path, count: int) -> None:
    """Wait until the log has `count` lines."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists() and log.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} lines: {finish(process)}")


def children(pid: int) -> list[int]:
    """Live processes that `pid` started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found
