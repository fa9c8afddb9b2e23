"""What a run does with its checkpoints: saves that fail, signals at any time, the end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.trainer import train
from fsdpplan.trainer.checkpoint import storage as checkpoint_storage
from fsdpplan.trainer.checkpoint.files import resumable
from fsdpplan.trainer.checkpoint.progress import read_progress
from fsdpplan.trainer.checkpoint.runs import CheckpointFailed
from fsdpplan.trainer.errors import TrainingDiverged
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.signals import STOP_SIGNALS
from tests.trainer import plans

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("alone", "own_signals")]

SMALL = {"layers": 1, "hidden": 16, "ffn_hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8}
FOR_EVER = "100000"

Publish = Callable[..., None]


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The handlers of this process, which a run takes over."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(folder: Path, *arguments: str) -> None:
    """A run of one process that saves after every other step."""
    plan = folder / "plan.json"
    plan.write_text(plans.plan_text(model=SMALL, training={"seq_len": 8}))
    train.run_training(
        parse_options(
            [
                *("--plan", str(plan), "--metrics", str(folder / "metrics.jsonl")),
                *("--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "2"),
                *arguments,
            ]
        )
    )


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Lines of the metrics file."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def saved_step(folder: Path) -> int:
    """Where the checkpoint to resume from stands."""
    return read_progress(resumable(folder / "saved")[0]).step


def instead_of_publishing(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Publish], None]
) -> None:
    """Let `act(number of the save, publish)` decide."""
    publish: Publish = checkpoint_storage.publish  # type: ignore[attr-defined]
    saves = 0

    def acted(*arguments: Any) -> None:
        nonlocal saves
        saves += 1
        act(saves, lambda: publish(*arguments))

    monkeypatch.setattr(checkpoint_storage, "publish", acted)


def disk_full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("how", ["--checkpoint-async", "--no-checkpoint-async"])
def test_a_save_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    instead_of_publishing(
        monkeypatch, lambda number, publish: disk_full() if number == 2 else publish()
    )
    run(tmp_path, "--steps", "8", how)
    assert [line["step"] for line in events(tmp_path, "checkpoint_failed")] == [4]
    assert [line["step"] for line in events(tmp_path, "checkpoint")] == [2, 6, 8]
    assert (
        "step 4 was not saved: No space left on device; training goes on" in capsys.readouterr().err
    )
    assert saved_step(tmp_path) == 8


def test_the_last_state_is_tried_twice_and_then_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def act(number: int, publish: Callable[[], None]) -> None:
        tried.append(number)
        disk_full() if number > 1 else publish()

    instead_of_publishing(monkeypatch, act)
    with pytest.raises(CheckpointFailed, match="after step 4, is not saved: No space left") as told:
        run(tmp_path, "--steps", "4")
    assert told.value.exit_code == 1
    assert tried == [1, 2, 3]
    assert saved_step(tmp_path) == 2
    assert events(tmp_path, "summary")[0]["step"] == 4


def test_a_run_that_diverges_keeps_what_was_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train.one_step

    def diverging(run_: train.TrainingRun) -> int:
        if run_.progress.step == 2:
            raise TrainingDiverged("the loss is nan")
        return step(run_)

    monkeypatch.setattr(train, "one_step", diverging)
    with pytest.raises(TrainingDiverged):
        run(tmp_path, "--steps", "9")
    assert saved_step(tmp_path) == 2
    assert [line["step"] for line in events(tmp_path, "checkpoint")] == [2]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_the_first_step_stops_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    set_up = train.set_up

    def interrupted(*arguments: Any) -> train.TrainingRun:
        os.kill(os.getpid(), number)
        return set_up(*arguments)

    monkeypatch.setattr(train, "set_up", interrupted)
    run(tmp_path, "--steps", FOR_EVER)
    (summary,) = events(tmp_path, "summary")
    assert (summary["step"], summary["stopped_by_signal"]) == (1, number)
    assert saved_step(tmp_path) == 1


@pytest.mark.parametrize("how", ["--checkpoint-async", "--no-checkpoint-async"])
def test_signals_during_saves_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def act(number: int, publish: Callable[[], None]) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        publish()
        os.kill(os.getpid(), signal.SIGTERM)

    instead_of_publishing(monkeypatch, act)
    run(tmp_path, "--steps", FOR_EVER, how)
    (summary,) = events(tmp_path, "summary")
    assert summary["stopped_by_signal"] in (signal.SIGUSR1, signal.SIGTERM)
    assert saved_step(tmp_path) == summary["step"]
    monkeypatch.undo()
    steps = str(summary["step"] + 3)
    run(tmp_path, "--steps", steps, "--resume", "required", "--allow-changes")
    trained = [line["step"] for line in events(tmp_path, "step")]
    assert trained == list(range(1, summary["step"] + 4))


def test_a_damaged_one_is_told_and_the_older_one_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--steps", "4")
    whole = events(tmp_path, "step")
    (tmp_path / "saved" / "step-00000004" / "__0_0.distcp").write_bytes(b"")
    run(tmp_path, "--steps", "4")
    assert "step-00000004 is damaged: __0_0.distcp has 0 bytes" in capsys.readouterr().err
    again = events(tmp_path, "step")
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
    assert saved_step(tmp_path) == 4
