"""What a running job knows of its time limit: `emit/bash/limit.sh`, by itself."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.emit.job import MARGIN_SECONDS, STEPS_TO_LEAVE

LIMIT = files("fsdpplan") / "emit" / "bash" / "limit.sh"


def seconds_to_leave(metrics: Path, *, signal: int, save: int = 0) -> int:
    words = (
        f"set -euo pipefail; signal_seconds={signal} save_seconds={save}"
        f" steps_to_leave={STEPS_TO_LEAVE} margin_seconds={MARGIN_SECONDS}"
    )
    done = subprocess.run(
        ["bash", "-c", f"{words}; . {LIMIT}; seconds_to_leave"],
        env={"FSDPPLAN_METRICS": str(metrics), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return int(done.stdout)


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def step(seconds: float) -> dict[str, Any]:
    return {"event": "step", "step": 3, "loss": 1.0, "step_seconds": seconds, "data_seconds": 900.0}


START = {"event": "start", "step": 0, "steps": 9}
SAVED = {"event": "checkpoint", "step": 3, "path": "a", "seconds": 15.0, "blocking_seconds": 1.0}
JUDGED = {"event": "eval", "step": 3, "loss": 1.0, "seconds": 7.5}


@pytest.mark.parametrize(
    ("events", "measured"),
    [
        ([START, step(300.0), step(18.0), step(20.0), SAVED], 60 + 15),
        ([START, step(300.0), step(2e-5), SAVED], 15 + 15),
        ([START, step(20.0), step(20.0), SAVED, JUDGED], 60 + 15 + 7.5),
        ([START, step(9.0), step(20.0), START, step(400.0), step(10.0), SAVED], 60 + 15),
        ([START, step(20.0), step(20.0)], 60 + 40 + 20),
    ],
)
def test_it_leaves_as_early_as_it_measured(
    events: list[dict[str, Any]], measured: float, tmp_path: Path
) -> None:
    metrics = write(tmp_path / "metrics.jsonl", *events)
    found = seconds_to_leave(metrics, signal=1, save=40)
    assert measured + MARGIN_SECONDS <= found <= measured + MARGIN_SECONDS + 2
    assert seconds_to_leave(metrics, signal=5000, save=40) == 5000


@pytest.mark.parametrize("text", ["", "{\n", '{"event": "step", "step_seconds": "x"}\n', "\0\n"])
def test_what_is_no_metrics_changes_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    assert seconds_to_leave(path, signal=120) == 120
    assert seconds_to_leave(tmp_path / "none", signal=120) == 120
