"""The feed: whoever makes a step's data, and when, it is the same."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import DataWorkerLost, RankError, TrainerError
from fsdpplan.trainer.report import data_words
from fsdpplan.trainer.text import feed
from fsdpplan.trainer.text.data import Data, SyntheticSequences, micro_batches, open_data
from fsdpplan.trainer.text.feed import AheadFeed, Feed, Rate, open_feed
from fsdpplan.trainer.text.mixture import share_of
from fsdpplan.trainer.tokenize import main as tokenize
from tests.trainer import plans

CPU = torch.device("cpu")
PLAN = parse_plan(plans.plan_text(model={"vocab": 260}, dp_shard=2, num_microbatches=2))


def texts(folder: Path) -> list[str]:
    """A folder of text, a text, and a token file."""
    (folder / "web").mkdir()
    lines = [json.dumps({"text": f"document {number} " * (number % 7)}) for number in range(200)]
    (folder / "web" / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("".join(f"{number} " for number in range(1000)))
    tokens = folder / "c.tokens"
    tokenize(["--documents", str(folder / "b.txt"), "-o", str(tokens)])
    return [f"{folder / 'web'}=2", f"{folder / 'b.txt'}=1", f"{tokens}=1"]


def of(data: Data, plan: PlanConfig = PLAN, **others: Any) -> Feed:
    return Feed(**{"data": data, "plan": plan, "rank": 1, "device": CPU, "packs": True, **others})


@pytest.fixture
def mixed(tmp_path: Path) -> Data:
    return open_data(PLAN, [share_of(text) for text in texts(tmp_path)], seed=3)


@pytest.fixture
def opened() -> Iterator[list[AheadFeed]]:
    """What a test opens here is closed."""
    found: list[AheadFeed] = []
    yield found
    for each in found:
        each.close()


def ahead(opened: list[AheadFeed], data: Data, *, workers: int, prefetch: int = 2) -> AheadFeed:
    found = AheadFeed(of(data), workers=workers, prefetch=prefetch)
    opened.append(found)
    return found


def take_all(made: AheadFeed, *, steps: range) -> None:
    for step in steps:
        made.take(8 * step)


def flat(batches: list[Any]) -> list[Any]:
    return [part.tolist() for batch in batches for part in batch if part is not None]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_is_made_ahead_is_what_the_step_would_have_made(
    workers: int, mixed: Data, opened: list[AheadFeed]
) -> None:
    made = ahead(opened, mixed, workers=workers)
    made.rate(16)
    for step in range(2, 12):
        expected = micro_batches(mixed, PLAN, first=8 * step, rank=1, device=CPU, packs=True)
        assert flat(made.take(8 * step)) == flat(expected)


def test_a_run_may_go_on_elsewhere(mixed: Data, opened: list[AheadFeed]) -> None:
    made = ahead(opened, mixed, workers=1)
    for first in (0, 8, 80, 88, 8):
        expected = micro_batches(mixed, PLAN, first=first, rank=1, device=CPU, packs=True)
        assert flat(made.take(first)) == flat(expected)
    assert sum(thread.name == "data" for thread in threading.enumerate()) == 1


class Counted(SyntheticSequences):
    """Counts what was made."""

    made = 0

    def __call__(self, number: int) -> Tensor:
        type(self).made += 1
        return super().__call__(number)


def test_no_more_is_made_ahead_than_was_asked_for(opened: list[AheadFeed]) -> None:
    made = ahead(opened, Counted(seq_len=24, vocab=61, seed=0), workers=0, prefetch=3)
    made.take(0)
    deadline = time.monotonic() + 120
    while Counted.made < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert Counted.made == 4 * (1 + 3)


def test_a_worker_that_dies_is_one_error_and_not_a_hang(
    mixed: Data, opened: list[AheadFeed]
) -> None:
    made = ahead(opened, mixed, workers=2)
    made.take(0)
    line = made._line
    assert line is not None
    os.kill(line._workers[1].pid, signal.SIGKILL)
    with pytest.raises(DataWorkerLost, match="SIGKILL"):
        take_all(made, steps=range(1, 9))


def test_text_that_changes_is_said_as_in_the_step(tmp_path: Path, opened: list[AheadFeed]) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some text " * 90)
    data = open_data(PLAN, [share_of(str(path))], seed=0)
    path.write_text("less")
    with pytest.raises(RankError, match="changed under the run"):
        ahead(opened, data, workers=1).take(0)


def test_nothing_is_left_of_a_feed_that_is_closed(mixed: Data, opened: list[AheadFeed]) -> None:
    made = ahead(opened, mixed, workers=2)
    made.take(0)
    line = made._line
    assert line is not None
    pids = [worker.pid for worker in line._workers]
    made.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not [thread for thread in threading.enumerate() if thread.name == "data"]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_step_says_how_fast_data_is_made(
    workers: int, mixed: Data, opened: list[AheadFeed]
) -> None:
    made = of(mixed) if workers == 0 else ahead(opened, mixed, workers=1)
    rate = made.rate(0)
    assert rate.workers == workers
    assert 1e2 < rate.tokens_per_second < 1e9
    expected = micro_batches(mixed, PLAN, first=0, rank=1, device=CPU, packs=True)
    assert flat(made.take(0)) == flat(expected)


@pytest.mark.parametrize(
    ("workers", "ahead_steps", "needed", "words"),
    [
        (2, 2, 500.0, "1,000 tokens/s by 2 workers, the planned step needs 500: 2.0 times as fast"),
        (2, 2, 4000.0, r"too slow, .* give it more processes \(--data-workers 8\)"),
        (0, 2, 4000.0, "in a thread of its own, .*: that is too slow"),
        (0, 0, 10.0, "in the step's thread, the planned step needs 10: 100.0 times as fast"),
        (0, 0, 500.0, "each step is 50% longer by it; leave --data-workers 0 out"),
        (1, 2, None, "1,000 tokens/s by a worker$"),
    ],
)
def test_data_that_cannot_feed_the_step_is_said(
    workers: int, ahead_steps: int, needed: float | None, words: str
) -> None:
    rate = Rate(tokens_per_second=1000.0, workers=workers, ahead=ahead_steps)
    assert re.search(words, data_words(rate, needed))


def test_workers_are_as_many_as_a_rank_has_processors_for(
    mixed: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(cores: int, ranks: int) -> int:
        monkeypatch.setattr(feed, "cpu_share", lambda of: cores // of)
        found = open_feed(of(mixed), workers=None, prefetch=None, ranks=ranks)
        assert isinstance(found, AheadFeed)
        return found._workers

    assert [chosen(*each) for each in ((2, 2), (64, 8), (192, 8), (8, 1))] == [1, 2, 4, 2]


def test_made_up_tokens_and_no_workers_need_no_thread(mixed: Data) -> None:
    made_up = of(SyntheticSequences(seq_len=24, vocab=61, seed=0))
    assert open_feed(made_up, workers=None, prefetch=None, ranks=1) is made_up
    here = of(mixed)
    assert open_feed(here, workers=0, prefetch=None, ranks=1) is here


def test_what_would_mean_nothing_is_refused(mixed: Data) -> None:
    with pytest.raises(TrainerError, match="--prefetch 3"):
        open_feed(of(mixed), workers=0, prefetch=3, ranks=1)
    made_up = of(SyntheticSequences(seq_len=24, vocab=61, seed=0))
    with pytest.raises(TrainerError, match="--data-workers 2 is for text"):
        open_feed(made_up, workers=2, prefetch=None, ranks=1)
