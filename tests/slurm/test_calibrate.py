"""`calibrate` in an allocation of a real Slurm."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMachine
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]

MEASURE = f"""
    import os, sys
    sys.path.insert(0, {str(ROOT)!r})
    os.environ["PYTHONPATH"] = {str(ROOT)!r}
    from pathlib import Path
    from fsdpplan.run.calibrate.measure import Ranks, Settings, measure
    settings = Settings(device="cpu", seconds=30, largest_bytes=2**20)
    measure(settings, ranks=Ranks(device="cpu", processes=2, nodes=2), out=Path(sys.argv[1]))
"""


def test_all_nodes_of_an_allocation_are_measured_together(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    log = tmp_path / "measured.jsonl"
    program = (sys.executable, "-c", textwrap.dedent(MEASURE), str(log))
    done = slurm.run(
        *("salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", *program),
        cwd=tmp_path,
        seconds=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    machine, *rows = read_measurements(log)
    assert isinstance(machine, MeasuredMachine)
    assert (machine.world, machine.hosts) == (4, ("node1", "node2"))
    groups = {row.group for row in rows if isinstance(row, MeasuredCall)}
    assert groups == {"inside", "across", "world", "pair"}
