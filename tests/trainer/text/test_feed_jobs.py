"""Runs whose data is made ahead: the same losses, also behind a kill; no worker is left."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import jobs

pytestmark = pytest.mark.gloo

BYTES = {"vocab": 260}
TOLERANCE = 2e-5
"""Of losses on another number of ranks, which round otherwise."""


def sources(folder: Path) -> list[str]:
    """Two texts as a mixture."""
    (folder / "web").mkdir()
    lines = [json.dumps({"text": f"document {number} " * (number % 7)}) for number in range(300)]
    (folder / "web" / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("".join(f"{number} " for number in range(1000)))
    return ["--data", f"{folder / 'web'}=0.7", "--data", f"{folder / 'b.txt'}=0.3"]


def workers_of(folder: Path) -> list[int]:
    """Process ids of the data workers whose rank works in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            maps = (process / "maps").read_text()
        except OSError:
            continue
        if any(word.endswith(b"text/__main__.py") for word in command) and str(folder) in maps:
            found.append(int(process.name))
    return found


def wait_until_none(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while workers_of(folder):
        assert time.monotonic() < deadline, "workers are left"
        time.sleep(0.05)


def test_losses_are_those_of_data_made_in_the_step(tmp_path: Path) -> None:
    data = [*sources(tmp_path), "--steps", "16"]
    plan: dict[str, Any] = {"dp_shard": 2, "model": BYTES}
    said = jobs.train(tmp_path / "here", 2, *data, "--data-workers", "0", **plan)
    assert "in the step's thread" in said
    expected = jobs.losses(tmp_path / "here")

    # killed, and gone on with by one rank
    saves = ("--checkpoint-dir", str(tmp_path / "ck"), "--checkpoint-every", "4")
    folder = tmp_path / "killed"
    process = jobs.start(folder, 2, *data, *saves, "--data-workers", "1", **plan)
    pids = jobs.rank_pids(process)
    jobs.wait_for_step(process, folder, 9)
    assert len(workers_of(tmp_path)) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    jobs.finish(process, exit_code=signal.SIGKILL)
    wait_until_none(tmp_path)
    before = jobs.losses(folder)
    assert before == {step: expected[step] for step in before}

    said = jobs.train(folder, 1, *data, *saves, "--data-workers", "2", model=BYTES)
    assert "resumed after step" in said
    assert "by 2 workers" in said
    assert jobs.losses(folder) == pytest.approx(expected, abs=TOLERANCE)
    wait_until_none(tmp_path)

    start = jobs.lines(folder, "start")[-1]
    assert start["data_workers"] == 2
    assert start["data_tokens_per_second_needed"] == 8 * 24 / 1.0
    assert start["data_tokens_per_second"] > 0
    last = jobs.lines(folder, "step")[-1]
    assert last["data_seconds"] > 0
    assert last["epoch"] == max(last["epochs"].values()) > 0
    assert list(last["epochs"]) == [str(tmp_path / "web"), str(tmp_path / "b.txt")]

    changed = [*data[:3], data[3].replace("0.3", "0.2"), "--steps", "17", "--allow-changes", *saves]
    said = jobs.train(folder, 1, *changed, exit_code=2, model=BYTES)
    assert "a mixture of text" in said


def test_a_run_ends_with_one_error_where_a_worker_dies(tmp_path: Path) -> None:
    data = [*sources(tmp_path), "--steps", "100000", "--data-workers", "1"]
    process = jobs.start(tmp_path / "run", 1, *data, model=BYTES)
    jobs.wait_for_step(process, tmp_path / "run", 2)
    (worker,) = workers_of(tmp_path)
    os.kill(worker, signal.SIGTERM)  # as a scheduler does, which the rank answers
    os.kill(worker, signal.SIGKILL)
    said = jobs.finish(process, exit_code=1)
    assert "Traceback" not in said
    (error,) = (line for line in said.splitlines() if "error: " in line)
    assert error.startswith(f"[rank 0] error: data worker {worker} was ended by SIGKILL")


def test_a_signal_to_all_processes_ends_a_run_in_order(tmp_path: Path) -> None:
    data = [*sources(tmp_path), "--steps", "100000", "--data-workers", "2"]
    process = jobs.start(tmp_path / "run", 1, *data, model=BYTES)
    jobs.wait_for_step(process, tmp_path / "run", 2)
    for worker in workers_of(tmp_path):
        os.kill(worker, signal.SIGUSR1)
    process.send_signal(signal.SIGUSR1)
    said = jobs.finish(process)
    assert "error" not in said
    assert jobs.lines(tmp_path / "run", "summary")[0]["stopped_by_signal"] == signal.SIGUSR1
    wait_until_none(tmp_path)
