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
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""In a folder called tiny: a shape without a name has that of its folder."""


def benchmark(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Rows and table of a run over a tiny model and one that is too large for a process."""
    tiny = folder / "tiny" / "config.json"
    tiny.parent.mkdir()
    tiny.write_text(json.dumps(CONFIG), encoding="utf-8")
    rows, table = folder / "rows.jsonl", folder / "table.md"
    words = [f"--models={tiny}:2,llama-3.1-8b", "--kernels=eager", "--checkpointing=none"]
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
