"""The guide's script, its two lines and its job: the losses stay what they were."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "hugging-face.md"
TOLERANCE = 1e-4
"""The script prints five digits; two ranks' means are rounded apart."""


def block(language: str, containing: str) -> str:
    """The page's block of that language with those words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (text,) = [each for each in found if containing in each]
    return str(text)


def with_lines(script: str, change: str) -> tuple[str, int]:
    """(`script` with the lines marked + put behind the ones that stand before them, how many)."""
    lines, before, added = script.splitlines(), "", 0
    for line in change.splitlines():
        if line.startswith("+"):
            assert lines.count(before) == 1, f"{before!r} is not once in the script"
            lines.insert(lines.index(before) + 1, line[1:])
            added += 1
        elif line.strip():
            assert line[1:] in lines
            before = line[1:]
    return "\n".join(lines) + "\n", added


def run(folder: Path, *command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished.stdout


def mean_losses(output: str) -> dict[int, float]:
    """Step -> mean over the ranks."""
    losses = defaultdict(list)
    for step, loss in re.findall(r"rank \d+ step (\d+) loss ([\d.]+)", output):
        losses[int(step)].append(float(loss))
    return {step: sum(each) / len(each) for step, each in losses.items()}


@pytest.fixture
def alone(tmp_path: Path) -> dict[int, float]:
    """Losses of the script as it is, on one process."""
    script = block("python", "num_replicas=world")
    (tmp_path / "alone.py").write_text(script)
    return mean_losses(run(tmp_path, sys.executable, "alone.py"))


def as_planned(folder: Path) -> str:
    """What the script with two lines more prints under the page's plan."""
    script = block("python", "num_replicas=world")
    planned, added = with_lines(script, block("text", "+model = parallelize"))
    assert added == 2
    (folder / "train.py").write_text(planned)
    run(folder, "bash", "-c", block("bash", "--dp-shard 2 --program hf"))
    emit, _ = block("bash", "sbatch job.sbatch").splitlines()
    run(folder, "bash", "-c", emit)
    return run(folder, "bash", "job.sbatch")


def in_stages(folder: Path) -> str:
    """What the page's script for a pipeline prints."""
    (folder / "stages.py").write_text(block("python", "forward_backward(model, plan"))
    run(folder, "bash", "-c", block("bash", "--pp 2"))
    run(folder, "bash", "-c", block("bash", "--script stages.py"))
    return run(folder, "bash", "stages.sbatch")


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("planned", [as_planned, in_stages])
def test_the_script_loses_the_same_as_planned(
    planned: Callable[[Path], str], alone: dict[int, float], tmp_path: Path
) -> None:
    assert len(alone) == 8
    output = planned(tmp_path)
    assert mean_losses(output) == pytest.approx(alone, abs=TOLERANCE)
    if planned is as_planned:
        assert {line.split()[1] for line in output.splitlines() if "loss" in line} == {"0", "1"}


@pytest.mark.sampled(1)
@pytest.mark.gloo
def test_the_pages_function_is_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(block("python", "def build():"))
    run(tmp_path, "bash", "-c", block("bash", "--dp-shard 2 --program hf"))
    assert "goes through a step" in run(tmp_path, "bash", "-c", block("bash", "--build"))
