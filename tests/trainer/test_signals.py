"""Signals that ask for an orderly end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdpplan.trainer.checkpoint.files import resumable, step_of
from fsdpplan.trainer.signals import STOP_SIGNALS, STOPPED_VARIABLE, StopRequest, note_stop
from tests.trainer import jobs, plans


def test_a_request_is_remembered_however_often_it_comes() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopRequest()
    try:
        stop.listen()
        assert stop.number == 0
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
            assert stop.number == number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("local_rank", "noted"), [(None, True), ("0", True), ("1", False)])
def test_an_end_by_a_signal_is_noted_once_a_node_where_somebody_wants_to_know(
    local_rank: str | None, noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv(STOPPED_VARIABLE, raising=False)
    note_stop(signal.SIGUSR2)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    path = tmp_path / "stopped"
    monkeypatch.setenv(STOPPED_VARIABLE, str(path))
    note_stop(signal.SIGUSR2)
    assert (path.read_text() if path.exists() else None) == ("12\n" if noted else None)


@pytest.mark.gloo
def test_an_end_of_torchrun_is_an_orderly_end_of_its_ranks(tmp_path: Path) -> None:
    model = {"layers": 1, "hidden": 16, "ffn_hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8}
    saved = tmp_path / "saved"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "fsdpplan.trainer", "--steps", "1000000"),
            *("--metrics", str(tmp_path / "metrics.jsonl"), "--checkpoint-dir", str(saved)),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FSDPPLAN_PLAN": plans.plan_text(dp_shard=2, model=model),
        },
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    jobs.wait_for_step(process, tmp_path, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=jobs.TIMEOUT_SECONDS)
    (summary,) = jobs.lines(tmp_path, "summary")
    assert summary["stopped_by_signal"] == signal.SIGTERM, err[-2000:]
    assert step_of(resumable(saved)[0]) == summary["step"]


def test_another_thread_leaves_the_signals_alone() -> None:
    """Ray trains in one; Python would refuse to set a handler there."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with ThreadPoolExecutor(1) as threads:
        threads.submit(StopRequest().listen).result()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
