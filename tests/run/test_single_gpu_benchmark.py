"""The benchmark of single devices, on a CPU process: predictions first, then what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gloo

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "single_gpu.py"
TINY = Path(__file__).resolve().parents[1] / "gpu" / "tiny" / "config.json"
"""A shape without a name has that of its folder."""


def benchmark(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Rows and table of a run over a tiny model and one that is too large for a process."""
    rows, table = folder / "rows.jsonl", folder / "table.md"
    words = [f"--models={TINY}:2,llama-3.1-8b", "--kernels=eager", "--checkpointing=none"]
    words += ["--hardware=cpu", "--precision=fp32", "--seq-len=64", "--steps=4"]
    finished = subprocess.run(
        [sys.executable, str(PROGRAM), *words, f"--out={table}", f"--json={rows}", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    text = table.read_text(encoding="utf-8")
    assert finished.stdout == text
    return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()], text


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    rows, table = benchmark(tmp_path)
    assert [row["event"] for row in rows] == ["hardware", "predicted", "skipped", "measured"]
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    _, predicted, skipped, measured = rows
    expected, found = measured["predicted_and_measured"]["step_seconds"]
    assert expected == predicted["estimate"]["step_seconds"]["expected"]
    assert len(measured["each_step_seconds"]) == 4
    assert min(measured["each_step_seconds"]) <= found <= max(measured["each_step_seconds"])
    (line,) = [line for line in table.splitlines() if line.startswith("| tiny")]
    assert line.count("|") == 11
    assert "| 2 x 64 | eager | none |" in line
    assert f"not run: {skipped['case']}: it needs" in table
    assert "a CPU has no allocator" in table


def test_nothing_is_run_when_the_time_is_over(tmp_path: Path) -> None:
    rows, table = benchmark(tmp_path, "--budget-seconds=0")
    assert [row["event"] for row in rows] == ["hardware", "predicted", "skipped", "skipped"]
    assert "Measured on nothing yet" in table


SESSION = Path(__file__).resolve().parents[1] / "gpu" / "session.sh"
LEFT = ("host.json", "measured.toml", "measured.jsonl", "rows.jsonl", "table.md", "session.log")


def session(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What a machine with a GPU is asked for, on another device."""
    return subprocess.run(
        ["bash", str(SESSION), "--device", *words],
        env={**os.environ, "OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_a_session_passes_to_its_last_line_without_a_gpu(tmp_path: Path) -> None:
    done = session(tmp_path, "cpu")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert f"session: results in {tmp_path}" in done.stdout.splitlines()[-1]
    for part in ("detect", "calibrate", "table", "tests"):
        assert f"session: {part} ended with 0" in done.stdout
    assert "only a device shows" in done.stdout
    assert all((tmp_path / name).stat().st_size for name in LEFT)
    assert "| tiny | 2 x 64 | eager | none |" in (tmp_path / "table.md").read_text()


def test_a_session_on_a_device_that_it_does_not_know_says_so(tmp_path: Path) -> None:
    done = session(tmp_path, "tpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "session: --device must be cuda or cpu, not 'tpu'\n"
