"""The tests' own Slurm leaves nothing behind, however they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.breaking import until
from tests.slurm.cluster import missing

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
KILLED = """\
import os, sys
from pathlib import Path
from tests.slurm.cluster import SlurmCluster
cluster = SlurmCluster(state=Path(sys.argv[1]), nodes=1, cpus=1, gpus=0, quotas=1)
cluster.start()
cluster.run("sbatch", "--wrap=sleep 600", cwd=cluster.state)
print(cluster.prefix, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_cluster_whose_tests_are_killed_ends(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    state = tmp_path / "state"
    state.mkdir()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(state)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=False,
    )
    prefix = killed.stdout.strip()
    assert prefix.startswith("fsdpplan")
    until(lambda: not left_of(state, prefix), what="nothing left of the cluster")


def left_of(state: Path, prefix: str) -> list[str]:
    """Processes, network namespaces and mounts."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(state).encode() in (folder / "environ").read_bytes():
                processes.append(folder.name)
        except OSError:
            continue
    namespaces = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.split()
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [
        *processes,
        *(name for name in namespaces if name.startswith(f"{prefix}-")),
        *(mount for mount in mounts if str(state) in mount),
    ]
