"""The commands of the guide to fine-tuning, on a tiny model and chats: the job learns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import jobs
from tests.trainer.text import chat_cases
from tests.trainer.text.chat_cases import turn

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "fine-tune.md"
EPOCHS = 3


def chats(first: int, last: int) -> list[chat_cases.Chat]:
    """Questions that are alike, of which some can be held out."""
    return [
        [turn("user", f"what is {n}?"), turn("assistant", f"it is {n}, and so be short {n % 7}")]
        for n in range(first, last)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with its tokenizer, and chats."""
    place = tmp_path_factory.mktemp("guide")
    model: dict[str, Any] = {"model": {"vocab": 320, "max_positions": 96}, "dp_shard": 1}
    words = ("--steps", "2", "--export-hf", str(place / "model"))
    jobs.train(place / "made", 1, *words, training={"seq_len": 96}, **model)
    chat_cases.make_tokenizer(place / "model", chat_cases.CHATML)
    chat_cases.write_chats(place / "chats.jsonl", chats(0, 2000))
    chat_cases.write_chats(place / "held.jsonl", chats(2000, 2050))
    return place


def commands(folder: Path) -> str:
    """The guide's first block, for the tiny model and two processes."""
    block = re.search(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    script = block[1]
    for theirs, ours in (
        ("--model llama-3.1-8b --gpus 8", "--config model/config.json --gpus 2 --hardware cpu"),
        ("/shared/Llama-3.1-8B", "model"),
        ("/shared/out", "out"),
        ("fsdpplan run\n", "fsdpplan run --target here --no-ledger\n"),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    return script.replace("fsdpplan ", f"{sys.executable} -m fsdpplan ")


def test_the_job_of_the_guide_learns_in_each_epoch(folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = folder.glob("fsdpplan-runs/*/metrics.jsonl")
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    held = [event["loss"] for event in events if event["event"] == "eval"]
    steps = [event for event in events if event["event"] == "step"]
    assert len(held) >= EPOCHS
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)
    assert steps[-1]["epoch"] == pytest.approx(EPOCHS, abs=0.1)
    assert len(steps) >= 10 * EPOCHS
    assert max(step["learning_rate"] for step in steps) == pytest.approx(2e-5)
    said = done.stdout + done.stderr + "".join(p.read_text() for p in metrics.parent.glob("*.out"))
    assert re.search(r"an epoch is [\d.]+ steps of 64 sequences; 3 are \d+ steps", said), said
    assert "learning rate 2e-05, warm-up of" in said
    assert (folder / "out" / "config.json").is_file()
