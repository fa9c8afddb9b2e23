from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.run.follow.follow import Follower, preflight_words, with_host
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


def test_where_the_program_says_nothing_torchrun_names_the_rank(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = Follower(metrics=tmp_path / "metrics", display=Remembers())
    follower.follow_log(log)
    report = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-22_12:43:22\n"
        "  host      : node3\n  rank      : 2 (local_rank: 0)\n"
        "  exitcode  : {}\n  error_file: <N/A>\n"
    )
    killed = report.format("-9 (pid: 22040)  (SIGKILL)")
    other = report.format("7 (pid: 4)").replace("rank      : 2", "rank      : 0")
    log.write_text("".join(f"2: {line}\n" for line in killed.splitlines()) + other)
    follower.poll(ended=True)
    assert follower.complaint == "rank 2 on node3 was ended by SIGKILL"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("0: hello", "n7: hello"),
        (" 1: 2: hello", "n8: 2: hello"),
        ("2: there is no third host", "2: there is no third host"),
        ("hello", "hello"),
        ("12:30 noon", "12:30 noon"),
    ],
)
def test_lines_of_several_nodes_have_the_hosts_name(line: str, shown: str) -> None:
    assert with_host(line, ("n7", "n8")) == shown
    assert with_host(line, ()) == line


def test_what_was_there_before_is_heard_and_not_shown(tmp_path: Path) -> None:
    log, display = tmp_path / "log", Remembers()
    follower = Follower(metrics=tmp_path / "metrics", display=display)
    log.write_text("0: error: the disk is full\n")
    follower.hear_log(log)
    with log.open("a") as file:
        file.write("bye\n")
    follower.poll(ended=True)
    assert follower.complaint == "the disk is full"
    assert display.lines == ["bye"]


def test_steps_are_counted_over_all_starts(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    follower = Follower(metrics=metrics, display=Remembers())
    start = '{"event": "start", "step": %d, "steps": 9}\n'
    metrics.write_text(start % 2 + '{"step": 3}\n{"step": 4}\n')
    follower.poll()
    assert follower.steps_done == 2
    # A trainer that goes on writes the file anew, up to its checkpoint.
    (tmp_path / "new").write_text(start % 2 + '{"step": 3}\n' + start % 3)
    (tmp_path / "new").replace(metrics)
    follower.poll()
    assert (follower.steps_done, follower.measured.steps) == (1, ())
    with metrics.open("a") as file:
        file.write("".join(f'{{"step": {step}}}\n' for step in range(4, 10)))
    follower.poll()
    assert follower.steps_done == 7
    assert follower.measured.is_complete


def test_events_in_the_output_are_gathered_where_no_file_is_shared(tmp_path: Path) -> None:
    metrics, display = tmp_path / "metrics", Remembers()
    metrics.write_text("what was gathered before\n")
    follower = Follower(metrics=metrics, display=display, collects=True)
    follower.show(['0: {"event": "start", "step": 0, "steps": 9}', '{"event": "step", "step": 1}'])
    follower.show(["hello"])
    follower.poll(ended=True)
    assert (display.steps, display.lines) == ([1], ["hello"])
    assert len(metrics.read_text().splitlines()) == 2


def test_events_in_the_output_are_lines_where_the_file_is_shared(tmp_path: Path) -> None:
    display = Remembers()
    follower = Follower(metrics=tmp_path / "metrics", display=display)
    follower.show(['{"event": "step", "step": 1}'])
    assert display.lines == ['{"event": "step", "step": 1}']


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"passed": True, "seconds": 12.5}, "preflight passed in 12.5 s"),
        (
            {"passed": True, "seconds": 2, "warnings": ["a", "b"]},
            "preflight passed in 2.00 s, with 2 warnings in the log",
        ),
        (
            {"passed": False, "problem": "tp: n3 does not answer"},
            "preflight failed: tp: n3 does not answer",
        ),
        ([], None),
        ({}, None),
    ],
)
def test_the_preflight_is_one_line(record: object, words: str | None, tmp_path: Path) -> None:
    path, display = tmp_path / "preflight.json", Remembers()
    follower = Follower(metrics=tmp_path / "m", display=display, run_folder=tmp_path)
    path.write_text(json.dumps(record))
    assert preflight_words(path) == words
    follower.poll()
    follower.poll()
    assert display.states == ([] if words is None else [words])
