"""What is idle in a real Slurm is what a plan is made for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

RECOMMEND = (
    *(sys.executable, "-m", "fsdpplan", "recommend", "--from-slurm", "--model", "llama-3.2-1b"),
    *("--cp", "1", "--pp", "1", "--tp", "1", "--no-ledger", "--json"),
)


def test_what_slurm_has_idle_is_planned_for(slurm: SlurmCluster, tmp_path: Path) -> None:
    listed = slurm.run("sinfo", "--noheader", "-N", "--partition=main", "-o", "%T", cwd=tmp_path)
    done = slurm.run(*RECOMMEND, cwd=tmp_path, seconds=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # other tests' jobs may end in between
    idle = listed.stdout.split().count("idle")
    assert found["cluster"]["gpus"] >= 8 * idle > 0
    assert found["cluster"]["gpus_per_node"] == 8
    assert found["cluster"]["name"] == "dgx-h100"
