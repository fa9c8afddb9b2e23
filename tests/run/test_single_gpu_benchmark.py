"""The benchmark of single devices, on a CPU process: predictions first, then what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.runs.table import bundled_runs, read_runs
from fsdpplan.run.evidence import evidence_at
from fsdpplan.spec.training import Training
from fsdpplan.validate.runs.express import Expressed, express

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
LEFT = {
    *("host.json", "measured.toml", "measured.jsonl", "measured.log"),
    *("steps.csv", "steps.jsonl", "device.jsonl", "session.log"),
}
"""Eight files: as many as a lent machine gives back."""


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
    for part in ("detect", "calibrate", "steps", "rank", "kernels", "tests"):
        assert f"session: {part} ended with 0" in done.stdout
    assert "only a device shows" in done.stdout
    assert {path.name for path in tmp_path.iterdir() if path.stat().st_size} == LEFT
    assert "| tiny | 2 x 64 | eager | none |" in done.stdout
    (run,) = read_runs(tmp_path / "steps.csv")
    assert (run.model_name, run.gpus, run.seq_len, run.allocator) == ("tiny", 1, 64, "growing")
    lines = (tmp_path / "device.jsonl").read_text(encoding="utf-8").splitlines()
    parts = [json.loads(line)["part"] for line in lines]
    assert parts == ["rank", "kernels"]


def test_a_session_on_a_device_that_it_does_not_know_says_so(tmp_path: Path) -> None:
    done = session(tmp_path, "tpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "session: --device must be cuda or cpu, not 'tpu'\n"


def test_rows_of_a_session_are_read_as_they_ran_and_join_a_table_once(tmp_path: Path) -> None:
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        from single_gpu_cases import Trial, planned
        from single_gpu_rows import joined, run_row, table
    finally:
        sys.path.remove(str(PROGRAM.parent))
    cluster = load_cluster("dgx-h100", gpus=1).cluster
    rows = []
    for sharding in ("ddp", "fsdp"):
        trial = Trial(
            model=load_model("llama-3.2-1b"),
            training=Training(seq_len=2048, global_batch=2),
            compiled=True,
            checkpointing="none",
            sharding=sharding,
        )
        plan = planned(trial, cluster)
        more = {"name": trial.name, "seconds": 0.2, "peak_bytes": 2.0**35, "torch": "2.13.0"}
        rows.append(run_row(plan, **more))
    (tmp_path / "steps.csv").write_text(table(rows), encoding="utf-8")
    read = [express(run) for run in read_runs(tmp_path / "steps.csv")]
    assert all(isinstance(one, Expressed) for one in read)
    layouts = [one.layouts[0].sharding for one in read if isinstance(one, Expressed)]
    assert layouts == ["ddp", "fsdp"]
    assert len(evidence_at(tmp_path).rows) == 2
    own = bundled_runs().parent / "train_runs_own.csv"
    once = joined(own, tmp_path / "steps.csv")
    (tmp_path / "own.csv").write_text(once, encoding="utf-8")
    assert joined(tmp_path / "own.csv", tmp_path / "steps.csv") == once
    assert len(read_runs(tmp_path / "own.csv")) == len(read_runs(own)) + 2
