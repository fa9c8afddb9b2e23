"""A live rank on a machine with too much to do is waited for; a dead one is not for long."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fsdpplan.trainer.preflight import watch as preflight_watch
from fsdpplan.trainer.preflight.findings import Findings
from fsdpplan.trainer.preflight.watch import (
    ANSWER_SECONDS,
    MOST_ANSWER_SECONDS,
    Answer,
    Watch,
    patience_seconds,
)

WAITS = Answer(stage=3, words="the all-reduce over dp_shard")


class Late:
    """A store in which rank 1 answers when it was asked after that many times."""

    def __init__(self, looks: int) -> None:
        self.store = HashStore()
        self.looks = looks

    def check(self, keys: list[str]) -> bool:
        if len(keys) > 1:
            self.looks -= 1
            if self.looks == 0:
                self.store.set("answer/1", Answer(stage=4, words="the end").text())
        return bool(self.store.check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))


def found(store: Late) -> str:
    said: list[Findings] = []
    watch = Watch(rank=0, world=2, host="n0", seconds=30.0, found=said.append)
    for rank in (0, 1):
        store.store.set(f"host/{rank}", f"n{rank}")
    store.store.set("answer/0", WAITS.text())
    watch._find(store)  # type: ignore[arg-type]
    return said[0].problem


def test_patience_grows_with_how_late_ranks_were_and_has_an_end() -> None:
    assert patience_seconds([]) == patience_seconds([-1.0, 0.0]) == ANSWER_SECONDS
    assert ANSWER_SECONDS < patience_seconds([1.0, 0.2]) < MOST_ANSWER_SECONDS
    assert patience_seconds([1e9]) == MOST_ANSWER_SECONDS


def test_a_rank_that_was_late_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_watch, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(preflight_watch, "POLL_SECONDS", 0.001)
    store = Late(looks=5)
    store.store.set("late/1", "60.0")
    assert "did not answer" not in found(store)


def test_a_rank_that_was_never_late_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_watch, "MOST_ANSWER_SECONDS", 0.0)
    assert "rank 1 on n1 did not answer" in found(Late(looks=5))
