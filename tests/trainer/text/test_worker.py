"""Data workers: what they read is what is read here, and they end with their rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fsdpplan import trainer
from fsdpplan.trainer.errors import DataWorkerLost, RankError, TrainerError
from fsdpplan.trainer.text.stream import TextSource
from fsdpplan.trainer.text.worker import DataWorker


def text_in(folder: Path) -> TextSource:
    path = folder / "text.jsonl"
    lines = [json.dumps({"text": f"document {number} " * (number % 7)}) for number in range(99)]
    path.write_text("\n".join(lines))
    return TextSource(path)


def reading(source: TextSource) -> DataWorker:
    index = source.index
    return DataWorker(
        tokenizer=source.tokenizer,
        texts=[[f"/dev/fd/{index.descriptor}", str(source.path)]],
        passed=[index.descriptor],
    )


def ask_on(worker: DataWorker) -> None:
    while True:
        worker.ask([[0, 0, 9]])
        worker.answer()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.01)


def test_a_worker_reads_what_is_read_here_also_from_an_index_without_a_name(
    tmp_path: Path,
) -> None:
    source = text_in(tmp_path)
    source.index.path.unlink()
    worker = reading(source)
    worker.ask([[0, 5, 1000], [0, 300, 301]])
    head, raw = worker.answer()
    worker.close()
    tokens = torch.frombuffer(raw, dtype=torch.int64, count=996)
    starts = torch.frombuffer(raw, dtype=torch.bool, offset=8 * 996)
    assert tokens.tolist() == source.read(5, 1000).tolist() + source.read(300, 301).tolist()
    assert starts.tolist() == source.starts(5, 1000).tolist() + source.starts(300, 301).tolist()
    assert head["seconds"] > 0


def test_a_worker_imports_no_torch(tmp_path: Path) -> None:
    worker = reading(text_in(tmp_path))
    worker.ask([[0, 0, 1]])
    worker.answer()
    mapped = Path(f"/proc/{worker.pid}/maps").read_text()
    worker.close()
    assert "libtorch" not in mapped


def test_what_a_worker_meets_is_raised_as_what_it_is(tmp_path: Path) -> None:
    source = text_in(tmp_path)
    source.path.write_text('{"text": "less"}')
    worker = reading(source)
    worker.ask([[0, 0, 9]])
    with pytest.raises(RankError, match="changed under the run"):
        worker.answer()
    worker.close()
    worker = DataWorker(tokenizer=tmp_path / "none.json", files=[str(source.path)])
    worker.ask([[0, 0, 9]])
    with pytest.raises(TrainerError, match="tokenizer"):
        worker.answer()
    worker.close()


def test_a_worker_that_dies_is_one_error(tmp_path: Path) -> None:
    worker = reading(text_in(tmp_path))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataWorkerLost, match="ended by SIGKILL, perhaps for want of host memory"):
        ask_on(worker)
    worker.close()
    assert not is_running(worker.pid)


def test_a_worker_lets_signals_pass_and_ends_when_it_is_closed(tmp_path: Path) -> None:
    worker = reading(text_in(tmp_path))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        os.kill(worker.pid, number)  # the first ones before it runs any Python
    worker.ask([[0, 0, 9]])
    worker.answer()
    worker.close()
    wait_until_gone(worker.pid)


PARENT = """
import sys, time
from types import ModuleType
sys.modules["alone"] = ModuleType("alone")
sys.modules["alone"].__path__ = [sys.argv[1]]
from alone.text.worker import DataWorker
worker = DataWorker(tokenizer=None, texts=[sys.argv[2:]])
for _ in range(200):
    worker.ask([[0, 0, 4000]])  # more than a pipe holds: it waits to be read
print(worker.pid, flush=True)
time.sleep(60)
"""
"""A rank without torch, which would take seconds to import."""


def test_a_worker_ends_when_its_rank_is_killed(tmp_path: Path) -> None:
    source = text_in(tmp_path)
    folder = Path(trainer.__file__).parent
    words = [str(folder), str(source.index.path), str(source.path)]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *words], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_until_gone(pid)
