from __future__ import annotations

from pathlib import Path

from fsdpplan.run.follow import Follower
from tests.run.displays import Remembers


def test_both_files_are_shown_and_the_metrics_gathered(tmp_path: Path) -> None:
    log, metrics, display = tmp_path / "log", tmp_path / "metrics", Remembers()
    follower = Follower(metrics=metrics, display=display)
    follower.poll()
    follower.follow_log(log)
    log.write_text("one\ntwo")
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    follower.poll()
    assert (display.lines, display.steps) == (["one"], [1, 2])
    follower.follow_log(log)
    follower.poll(ended=True)
    assert display.lines == ["one", "two"]
    assert len(follower.measured.steps) == 2


def test_why_the_trainer_ended_is_what_it_said_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = Follower(metrics=tmp_path / "metrics", display=Remembers())
    follower.follow_log(log)
    log.write_text("step 1/9  loss 2\n3: [rank 5] error: the disk is full\nerror: another\n")
    follower.poll(ended=True)
    assert follower.complaint == "the disk is full"
