"""Signals that ask for an orderly end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan.trainer.checkpoint_files import resumable, step_of
from fsdpplan.trainer.signals import STOP_SIGNALS, StopRequest
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
