from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.errors import LaunchError
from fsdpplan.run.engines import local
from fsdpplan.run.engines.local import exit_code_of, run_here
from fsdpplan.run.follow.follow import Follower
from tests.run.displays import Remembers

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 120
"""For what comes at once where a machine has nothing else to do."""


def run(folder: Path, script: str, **environment: str) -> tuple[int, Remembers]:
    path, log, display = folder / "job.sbatch", folder / "job.log", Remembers()
    path.write_text(script)
    log.touch()
    follower = Follower(metrics=folder / "metrics.jsonl", display=display)
    follower.follow_log(log)
    code = run_here(
        script=path,
        log=log,
        folder=folder,
        environment={**os.environ, **environment},
        follower=follower,
        display=display,
    )
    return code, display


@pytest.mark.parametrize("code", [0, 1, 5, 17])
def test_the_exit_code_of_the_job_is_kept(tmp_path: Path, code: int) -> None:
    assert run(tmp_path, f"exit {code}")[0] == code


def test_an_end_by_a_signal_is_a_code_above_128(tmp_path: Path) -> None:
    assert run(tmp_path, "kill -KILL $$")[0] == 137
    assert exit_code_of(-15) == 143


def test_all_output_is_shown_down_to_an_unfinished_line(tmp_path: Path) -> None:
    _, display = run(tmp_path, "echo out; echo err >&2; printf last")
    assert display.lines == ["out", "err", "last"]


def test_the_steps_that_a_job_reports_are_followed(tmp_path: Path) -> None:
    steps = 'for n in 1 2 3; do echo "{\\"step\\": $n}" >>metrics.jsonl; sleep 0.05; done'
    assert run(tmp_path, steps)[1].steps == [1, 2, 3]


def test_a_run_leaves_no_process_behind(tmp_path: Path) -> None:
    # torchrun's ranks are in sessions of their own, so a signal to the group would miss them.
    run(tmp_path, f"setsid sleep 3000 & echo $! >{tmp_path}/pid; exit 0")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_what_ignores_term_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpplan.run.engines.local.GRACE_SECONDS", 0.5)
    stubborn = f"setsid bash -c 'trap \"\" TERM; echo $$ >{tmp_path}/pid; sleep 3000' &"
    run(tmp_path, f"{stubborn}\nuntil [ -s {tmp_path}/pid ]; do sleep 0.05; done")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_host_without_bash_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="bash"):
        run(tmp_path, "exit 0", PATH=str(tmp_path))


RUNNER = """
    import sys
    from pathlib import Path
    from tests.run.engines.test_local import run
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[1], "given.sh").read_text())[0])
"""


def start_runner(folder: Path, script: str) -> subprocess.Popen[bytes]:
    (folder / "given.sh").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUNNER), str(folder)], cwd=ROOT
    )
    wait_for(lambda: written(folder / "pid"))
    return process


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "INT"), (signal.SIGTERM, "TERM"), (signal.SIGUSR1, "USR1")]
)
def test_signals_are_passed_on_to_the_script(tmp_path: Path, number: int, name: str) -> None:
    script = f"trap 'exit 42' {name}; echo $$ >{tmp_path}/pid; while :; do sleep 0.1; done"
    process = start_runner(tmp_path, script)
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_SECONDS) == 42


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_while_the_script_is_started_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def start_slowly(**words: Any) -> subprocess.Popen[bytes]:
        process = start(**words)
        wait_for(lambda: written(tmp_path / "pid"))
        os.kill(os.getpid(), number)
        return process

    start = local._start
    monkeypatch.setattr(local, "_start", start_slowly)
    trap = f"trap 'exit 42' {number.name[3:]}"
    code, _ = run(tmp_path, f"{trap}; echo $$ >{tmp_path}/pid; while :; do sleep 0.1; done")
    assert code == 42


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_before_the_script_is_there_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def start_late(**words: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), number)
        return start(**words)

    start = local._start
    monkeypatch.setattr(local, "_start", start_late)
    # A bash that waits for a command takes an interrupt for the command's own, and goes on.
    assert run(tmp_path, "while :; do :; done")[0] == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_rest_is_ended_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupted(run_id: str) -> list[int]:
        os.kill(os.getpid(), number)
        return find(run_id)

    find = local.processes_of
    monkeypatch.setattr(local, "processes_of", interrupted)
    code, _ = run(tmp_path, f"setsid sleep 3000 & echo $! >{tmp_path}/pid; exit 17")
    assert code == 17
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_second_interrupt_kills_a_script_that_does_not_stop(tmp_path: Path) -> None:
    heeds_nothing = f"trap 'echo told >{tmp_path}/told' INT; trap '' TERM"
    script = f"{heeds_nothing}; echo $$ >{tmp_path}/pid; while :; do sleep 0.1; done"
    process = start_runner(tmp_path, script)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: written(tmp_path / "told"))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE_SECONDS) == 137


def test_the_script_ends_when_its_runner_is_killed(tmp_path: Path) -> None:
    process = start_runner(tmp_path, f"echo $$ >{tmp_path}/pid; sleep 3000 & wait")
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    wait_for(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def written(path: Path) -> bool:
    """Whether a whole line is there."""
    return path.exists() and path.read_text().endswith("\n")


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
