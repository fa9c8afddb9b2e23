from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsdpplan.run.follow.metric_events import Start, Step, Summary, parse_event
from fsdpplan.run.follow.metrics import Measured, MetricsTail


def step_line(step: int, seconds: float = 0.5) -> str:
    return json.dumps({"event": "step", "step": step, "loss": 2.0, "step_seconds": seconds})


def measured_of(*lines: str) -> Measured:
    measured = Measured()
    for line in lines:
        event = parse_event(line)
        assert event is not None
        measured = measured.plus(event)
    return measured


def test_events_are_told_apart() -> None:
    assert parse_event('{"event": "start", "step": 3, "steps": 9}') == Start(first_step=3, steps=9)
    assert isinstance(parse_event(step_line(1)), Step)
    assert isinstance(parse_event('{"event": "summary", "world": 4}'), Summary)
    assert isinstance(parse_event('{"step": 4, "loss": 1}'), Step)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '{"event": "checkpoint", "step": 3}',
        '{"event": "step"}',
        '{"event": "step", "step": true}',
        '{"event": []}',
        "[" * 100_000,
    ],
)
def test_other_lines_are_passed_over(line: str) -> None:
    assert parse_event(line) is None


def test_a_value_of_another_type_counts_as_not_reported() -> None:
    event = parse_event('{"step": 1, "loss": "x", "allocated_bytes": 1.5, "step_seconds": null}')
    assert isinstance(event, Step)
    assert (event.loss, event.allocated_bytes, event.step_seconds) == (None, None, None)


def test_the_median_leaves_out_the_first_steps() -> None:
    slow = [step_line(i, 9.0) for i in range(5)]
    assert measured_of(*slow, *[step_line(i, 1.0) for i in range(5, 20)]).median(
        "step_seconds"
    ) == pytest.approx(1.0)
    assert measured_of(step_line(1, 4.0)).median("step_seconds") == pytest.approx(4.0)
    assert Measured().median("step_seconds") is None
    assert Measured().peak("allocated_bytes") is None


def test_a_new_start_forgets_the_run_before() -> None:
    measured = measured_of(step_line(1), '{"event": "start", "step": 0, "steps": 2}', step_line(1))
    assert len(measured.steps) == 1
    assert measured.start == Start(first_step=0, steps=2)


def test_only_the_new_run_of_a_used_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(step_line(1) + "\n" + step_line(2) + "\n")
    tail = MetricsTail(path)
    assert tail.poll() == []
    # A resumed run keeps the old lines in a new file, then says where it starts.
    kept = path.read_text() + '{"event": "start", "step": 2, "steps": 3}\n' + step_line(3) + "\n"
    (tmp_path / "partial").write_text(kept)
    os.replace(tmp_path / "partial", path)
    measured = Measured()
    for event in tail.poll():
        measured = measured.plus(event)
    assert [step.step for step in measured.steps] == [3]
