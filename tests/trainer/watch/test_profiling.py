"""Snapshots of memory: timelines, of what CUDA's allocator and the CPU's profiler say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.watch.profiling import (
    allocator_changes,
    memory_timeline,
    traced_changes,
)
from tests.trainer import jobs


def test_memory_is_a_tensors_until_its_release_is_asked_for() -> None:
    """Events as torch 2.13's `_snapshot` has them."""
    events = [
        {"action": "segment_alloc", "size": 2**21, "time_us": 10},
        {"action": "alloc", "size": 600, "time_us": 12},
        {"action": "alloc", "size": 100, "time_us": 15},
        {"action": "free_requested", "size": 600, "time_us": 20},
        {"action": "free_completed", "size": 600, "time_us": 90},
    ]
    line = memory_timeline(allocator_changes(events), start_bytes=50)
    assert [level for _, level in line.points] == [650, 750, 150]
    assert line.peak == (pytest.approx(3e-6), 750)
    assert memory_timeline([], start_bytes=50).peak == (0.0, 50)


def test_the_profiler_sees_what_a_cpu_allocates(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        first = torch.ones(1_000_000)
        second = first + 1
        del first, second
        torch.ones(10)
    seen.export_chrome_trace(str(trace))
    line = memory_timeline(traced_changes(json.loads(trace.read_text())), start_bytes=0)
    assert line.peak[1] == pytest.approx(2 * 4_000_000, rel=1e-3)
    assert line.points[-1][1] < 1000


@pytest.mark.gloo
def test_a_run_leaves_a_timeline_of_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    options = ("--steps", "5", "--memory-snapshot", "3:2", "--log-every", "5")
    out = jobs.train(tmp_path, 2, *options, dp_shard=2)
    (event,) = jobs.lines(tmp_path, "memory_snapshot")
    assert event["step"] == 4
    line = json.loads((tmp_path / "memory-rank-0.json").read_text())
    assert line["peak_bytes"] == event["peak_bytes"] > 50_000
    # 4,900 of six threads; once, on a busy machine, torch's profiler kept those of two
    assert len(line["points"]) > 20
    assert json.loads((tmp_path / "memory-trace-rank-0.json").read_text())["traceEvents"]
    assert not (tmp_path / "memory-rank-1.json").exists()
    assert "since a CPU's allocator keeps no history" in out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--memory-snapshot", "30:1"], "after the last step"),
        (["--profile", "20:2"], "ends after the last step, 20"),
        (["--memory-snapshot", "4:3", "--profile", "6:1"], "steps of their own"),
        (["--on-spike", "rollback", "--checkpoint-dir", "x"], "--checkpoint-every"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(words)
    assert why in capsys.readouterr().err
