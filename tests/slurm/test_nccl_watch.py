"""A job of a real Slurm whose ranks log sockets between nodes is ended, by `run` or by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.run.launch import Launch, emit_script
from fsdpplan.run.session import run_launch
from tests.emit.bench import with_parts
from tests.emit.plans import make_plan
from tests.run.displays import Remembers
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings/nccl"
EACH_NODE_ITS_LINES = """\
#!/bin/bash
#SBATCH --nodelist=node[1-2]
#SBATCH --ntasks-per-node=1
#SBATCH --output=job-%j.out
srun --export=ALL bash -c 'host=$(hostname)
grep "^${{host/node/n0}}:" {recording} >"${{NCCL_DEBUG_FILE//%h.%p/$host.$$}}"
sleep {seconds}'
"""


@pytest.mark.parametrize(
    ("name", "seconds", "exit_code"),
    [("2.14-sockets-ib-disabled", 300, 5), ("2.18-infiniband-nvls", 3, 0)],
)
def test_the_log_of_every_node_is_read_and_sockets_end_the_job(
    name: str,
    seconds: int,
    exit_code: int,
    slurm: SlurmCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(variable, slurm.environment[variable])
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    script = EACH_NODE_ITS_LINES.format(recording=RECORDINGS / f"{name}.log", seconds=seconds)
    launch = Launch(script=script, plan=make_plan("cuda", nodes=2), origin="a test")
    outcome = run_launch(launch, folder=tmp_path, target="slurm", display=Remembers())
    assert outcome.exit_code == exit_code
    assert (outcome.stopped is None) == (exit_code == 0)
    assert outcome.nccl is not None
    assert outcome.nccl.hosts == ("n01", "n02")
    assert outcome.job_id is not None
    assert outcome.job_id not in slurm.run("squeue", "--noheader", cwd=tmp_path).stdout


STAND_IN = """\
#!/bin/bash
if [ "$1" = -c ]; then exit; fi
host=$(hostname)
grep "^${{host/node/n0}}:" {recording} >"${{NCCL_DEBUG_FILE//%h.%p/$host.$$}}"
sleep {seconds}
"""
"""In place of Python: all nodes are fine, and each rank's NCCL says what was recorded."""


@pytest.mark.parametrize(
    ("name", "seconds", "exit_code", "says"),
    [
        ("2.14-sockets-ib-disabled", 300, 5, "over sockets although the plan counts on"),
        ("2.18-infiniband-nvls", 3, 0, "NCCL connects nodes by IB/GDRDMA"),
    ],
)
def test_a_bare_job_judges_itself(
    name: str, seconds: int, exit_code: int, says: str, slurm: SlurmCluster, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(recording=RECORDINGS / f"{name}.log", seconds=seconds))
    python.chmod(0o755)
    script = emit_script(make_plan("cuda", nodes=2), Job(python=str(python)))
    (tmp_path / "job.sbatch").write_text(with_parts(script, "sleep 10 ", "sleep 1 "))
    words = ("sbatch", "--parsable", "--wait", "--nodelist=node[1-2]", "job.sbatch")
    done = slurm.run(*words, cwd=tmp_path, seconds=240)
    log = (tmp_path / f"fsdpplan-{done.stdout.strip()}.out").read_text()
    assert done.returncode == exit_code, log
    assert log.count(says) == 1
    assert list((tmp_path / "fsdpplan-runs").glob("job-*/nccl.node1.*.log"))
