"""How fast text becomes micro-batches, without and with data workers, beside what a step needs.

    python tests/benchmarks/data.py               # words drawn here, a tokenizer trained on them
    python tests/benchmarks/data.py --text corpus/ --tokenizer tokenizer.json --workers 0,1,2,4

Reading is timed alone, as fast as it goes; then beside a step that keeps the interpreter of the
rank busy in Python, as launching kernels does: how much longer the same steps are, with their data,
than without any. The need is that of one rank: the tokens of its step over the step's seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.text.data import Data, open_data
from fsdpplan.trainer.text.feed import AheadFeed, Feed, open_feed, step_tokens
from fsdpplan.trainer.text.make_index import Text, all_pieces, counted
from fsdpplan.trainer.text.mixture import share_of
from tests.trainer import plans

CPU = torch.device("cpu")


def drawn_text(folder: Path, *, megabytes: int) -> Path:
    """Documents of words, of which few are frequent."""
    chance = random.Random(0)
    letters = "etaoinshrdlu"
    words = ["".join(chance.choices(letters, k=chance.randint(1, 10))) for _ in range(20_000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    path = folder / "text"
    path.mkdir()
    size, number = 0, 0
    while size < megabytes << 20:
        lines = [
            json.dumps({"text": " ".join(chance.choices(words, weights, k=400))})
            for _ in range(1000)
        ]
        written = "\n".join(lines) + "\n"
        (path / f"{number}.jsonl").write_text(written)
        size, number = size + len(written), number + 1
    return path


def trained_tokenizer(text: Path, out: Path) -> Path:
    """A byte-level BPE of 8,000 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False
    )
    first = min(text.rglob("*.jsonl")).read_text().splitlines()[:500]
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in first), trainer)
    tokenizer.save(str(out))
    return out


def busy(seconds: float) -> None:
    """A step: Python that holds the interpreter."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(200))


def opened(data: Data, plan: PlanConfig, workers: int) -> Feed | AheadFeed:
    feed = Feed(data=data, plan=plan, rank=0, device=CPU, packs=False)
    return open_feed(feed, workers=workers, prefetch=None, ranks=1)


def alone(data: Data, plan: PlanConfig, workers: int, steps: int) -> float:
    """Tokens a second of nothing but reading."""
    feed = opened(data, plan, workers)
    batch = plan.training.global_batch
    feed.take(0)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        feed.take(step * batch)
    seconds = time.perf_counter() - began
    feed.close()
    return steps * step_tokens(plan) / seconds


def beside_a_step(
    data: Data, plan: PlanConfig, workers: int, steps: int, step_seconds: float
) -> tuple[float, float]:
    """Median seconds of a step with its data, and of the wait in it."""
    feed = opened(data, plan, workers)
    batch = plan.training.global_batch
    feed.take(0)
    whole, waits = [], []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        feed.take(step * batch)
        waits.append(time.perf_counter() - began)
        busy(step_seconds)
        whole.append(time.perf_counter() - began)
    feed.close()
    return statistics.median(whole), statistics.median(waits)


def index_rates(path: Path, tokenizer: Path | None, workers: Sequence[int]) -> None:
    """Bytes a second that an index is counted with."""
    text = Text.find(path, tokenizer)
    size = sum(each.stat().st_size for each in text.files)
    first = None
    for count in sorted({1, *workers} - {0}):
        began = time.perf_counter()
        tokens = sum(each for _, each in counted(text, all_pieces(text.files), workers=count))
        rate = size / (time.perf_counter() - began)
        first = first or rate
        print(
            f"index, {count} processes: {rate / 1e6:8.2f} MB/s, {rate / first:.2f} times one "
            f"({tokens:,} tokens)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--megabytes", type=int, default=24, help="of text that is drawn")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--step-seconds", type=float, default=0.4)
    options = parser.parse_args()
    workers = [int(word) for word in options.workers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = options.text or drawn_text(Path(folder), megabytes=options.megabytes)
        tokenizer = options.tokenizer
        if options.text is None and tokenizer is None:
            tokenizer = trained_tokenizer(path, Path(folder) / "tokenizer.json")
        index_rates(path, tokenizer, workers)
        plan_of: dict[str, Any] = {
            "model": {"vocab": 1 << 20, "max_positions": 1 << 20},
            "training": {"seq_len": options.seq_len},
            "micro_batch": 1,
            "num_microbatches": options.micro_batches,
        }
        plan = parse_plan(plans.plan_text(**plan_of))
        data = open_data(plan, [share_of(f"{path}=1")], seed=0, tokenizer=tokenizer)
        needed = step_tokens(plan) / options.step_seconds
        print(f"a step of {options.step_seconds} s needs {needed:,.0f} tokens/s")
        for count in workers:
            rate = alone(data, plan, count, options.steps)
            whole, wait = beside_a_step(data, plan, count, options.steps, options.step_seconds)
            print(
                f"{count} workers: {rate:12,.0f} tokens/s alone, {rate / needed:6.2f} times the "
                f"need; a step with its data is {whole / options.step_seconds:.3f} times one "
                f"without, {wait / whole:.1%} of it waits"
            )


if __name__ == "__main__":
    main()
