"""Nothing in a step waits for the device, and what arrives later is right."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fsdpplan.emit.job import STEPS_TO_LEAVE
from fsdpplan.trainer import pace, train
from fsdpplan.trainer.pace import GarbageSchedule, StepClock
from fsdpplan.trainer.text.feed import Feed
from fsdpplan.trainer.torch_versions import has_grouped_mm
from tests.trainer import jobs, plans, waits

LOGGED = [step for step in range(1, waits.STEPS + 1) if step % waits.LOG_EVERY == 0]
MIXTURES = 3


@pytest.fixture(scope="module")
def reads(
    tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]
) -> dict[str, list[dict[str, int]]]:
    """Case -> what the steps read."""
    out = tmp_path_factory.mktemp("waits") / "reads.json"
    return jobs.measured(2, "tests.trainer.waits:measure_all", out, asked=asked("name"))


@pytest.mark.gloo
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", waits.CASES)
def test_between_logged_steps_nothing_reads_the_device(
    reads: dict[str, list[dict[str, int]]], name: str
) -> None:
    """What a logged step left is read, all at once, while the next one runs. Beside it, rows for
    experts of other ranks need the sizes of their messages, once a mixture; packed documents, where
    no kernel takes them together, their ends, once a micro-batch. In the first step of a pipeline
    torch lets its ranks ask each other for shapes; before that of a mixture there are forward
    passes, of which generators know nothing."""
    alone = 0 if has_grouped_mm() else MIXTURES  # the rows of experts that go one by one
    sizes = {"moe": alone, "moe_ep": MIXTURES + alone, "packed": 1}.get(name, 0)
    for step, found in enumerate(reads[name], start=1):
        if step > 1 or not ("pp" in name or "moe" in name):
            assert sum(found.values()) == sizes + (step - 1 in LOGGED)
            assert set(found) <= {"tolist"}


@pytest.mark.gloo
def test_a_line_tells_of_the_steps_since_the_line_before(tmp_path: Path) -> None:
    """Losses are those of a run whose every step is read; the summary counts all steps."""
    options = ("--steps", "9", "--checkpoint-every", "3", "--checkpoint-dir")
    each, some = tmp_path / "each", tmp_path / "some"
    jobs.train(each, 2, *options, str(each / "saved"), dp_shard=2)
    out = jobs.train(some, 2, *options, str(some / "saved"), "--log-every", "4", dp_shard=2)
    lines = jobs.lines(some, "step")
    assert [(line["step"], line["steps_averaged"]) for line in lines] == [(4, 4), (8, 4), (9, 1)]
    assert jobs.losses(some).items() < jobs.losses(each).items()
    (summary,), (every,) = jobs.lines(some, "summary"), jobs.lines(each, "summary")
    assert summary["steps_measured"] == every["steps_measured"] == 5
    assert (summary["first_loss"], summary["last_loss"]) == (
        every["first_loss"],
        every["last_loss"],
    )
    assert [line["step"] for line in jobs.lines(some, "checkpoint")] == [3, 6, 9]
    assert out.count("Python's garbage is collected every 50 steps") == 1


@pytest.mark.gloo
def test_no_number_is_saved_that_is_none_however_seldom_they_are_read(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = ("--learning-rate", "1e30", "--clip-norm", "inf", "--log-every", "100")
    options += ("--checkpoint-dir", str(saved), "--checkpoint-every", "4", "--steps", "8")
    out = jobs.train(tmp_path, 1, *options, exit_code=1)
    assert "error: the " in out
    assert not list(saved.glob("step-*"))
    (last,) = jobs.lines(tmp_path, "step")[-1:]
    assert last["loss"] is None or last["grad_norm"] is None


def signalled(folder: Path) -> None:
    """A job of which one rank gets a signal while it takes its third step's data."""
    take, taken = Feed.take, iter(range(1, 1000))

    def taking(feed: Feed, number: int) -> Any:
        if next(taken) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR2)
        return take(feed, number)

    Feed.take = taking  # type: ignore[method-assign]
    paths = [f"--plan={folder / 'plan.json'}", f"--metrics={folder / 'metrics.jsonl'}"]
    train.main([*paths, "--steps=1000", "--log-every=1000"])


@pytest.mark.gloo
def test_a_signal_is_obeyed_a_step_later_whatever_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plans.plan_text(dp_shard=2), encoding="utf-8")
    jobs.finish(jobs.start_function(2, "tests.trainer.test_pace:signalled", tmp_path))
    (summary,) = jobs.lines(tmp_path, "summary")
    assert (summary["step"], summary["stopped_by_signal"]) == (4, signal.SIGUSR2)
    # steps 3 and 4, and the one that a device has still to do when its host asks for step 3
    assert summary["step"] - 3 + 2 == STEPS_TO_LEAVE
    assert [line["step"] for line in jobs.lines(tmp_path, "step")] == [4]


class FakeEvent:
    """An event of a device that comes to it when the test says."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self, **_: Any) -> None:
        self.seconds: float | None = None
        self.made.append(self)

    def record(self) -> None:
        """Asked of the device."""

    def query(self) -> bool:
        return self.seconds is not None

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.seconds is not None
        assert later.seconds is not None
        return 1000 * (later.seconds - self.seconds)


def test_a_step_takes_what_the_device_takes_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.made = events = []
    clock = StepClock(torch.device("cuda"))
    clock.begin(apart=True)
    clock.end(1)
    clock.begin(apart=False)
    clock.end(2)
    clock.begin(apart=True)  # something else came between, which took from 9 s to 20 s
    clock.end(3)
    assert clock.done() == {}
    begun, first, second, begun_again, third = events
    begun.seconds, first.seconds = 1.0, 4.0
    assert clock.done() == {1: 3.0}
    second.seconds, begun_again.seconds, third.seconds = 9.0, 20.0, 22.0
    assert clock.done() == {2: 5.0, 3: 2.0}
    assert clock.done() == {}


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Generations that are collected."""
    found: list[int] = []
    monkeypatch.setattr(pace.gc, "collect", found.append)
    yield found
    gc.enable()


def test_garbage_is_collected_on_the_trainers_schedule_and_then_on_pythons(
    collected: list[int],
) -> None:
    schedule = GarbageSchedule(3)
    assert not gc.isenabled()
    for step in range(1, 8):
        schedule.after(step)
    assert collected == [1, 1, 1]  # first of all, and behind steps 3 and 6
    schedule.stop()
    assert gc.isenabled()


def test_garbage_is_pythons_own_matter_where_that_is_asked_for(collected: list[int]) -> None:
    schedule = GarbageSchedule(0)
    schedule.after(1)
    assert gc.isenabled()
    assert collected == []
    schedule.stop()
    assert gc.isenabled()
