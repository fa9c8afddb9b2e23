"""The commands of the guide to long sequences for a training in two lengths, on a tiny model: the
long part begins where the short one ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan.trainer.tokenize import main as tokenize

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(600), pytest.mark.sampled(1)]

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "long-context.md"
TINY = (
    "--layers 2 --hidden 32 --ffn-hidden 64 --heads 2 --kv-heads 2 --vocab 256 --precision fp32 "
    "--gpus 1 --hardware cpu"
)


def commands() -> str:
    """The guide's last block, for the tiny model and one process; the jobs run here."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    script = str(blocks[-1])
    for theirs, ours in (
        ("--model llama-3.1-8b --gpus 64 --hardware dgx-h100", TINY),
        ("--seq-len 8k --global-batch 512", "--seq-len 16 --global-batch 8"),
        ("--seq-len 128k --global-batch 32", "--seq-len 64 --global-batch 2"),
        ("--steps 20000", "--steps 60 --learning-rate 1e-2"),
        ("--steps 500", "--steps 2"),
        ("> short.sbatch", "> short.sbatch\nbash short.sbatch"),
        ("> long.sbatch", "> long.sbatch\nbash long.sbatch"),
        ("/shared/long.bin", "tokens.bin"),
        ("/shared/", ""),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    return "set -e\n" + script.replace("fsdpplan ", f"{sys.executable} -m fsdpplan ")


def test_the_long_part_begins_where_the_short_one_ended(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(GUIDE.read_text(encoding="utf-8"), encoding="utf-8")
    tokenize([str(tmp_path / "text.txt"), "-o", str(tmp_path / "tokens.bin")])
    done = subprocess.run(
        ["bash", "-c", commands()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    losses = {
        (int(step), int(steps)): float(loss)
        for step, steps, loss in re.findall(r"step (\d+)/(\d+)  loss ([\d.]+)", done.stdout)
    }
    start = losses[1, 60]
    assert losses[60, 60] < start - 1
    assert losses[1, 2] < start - 1
