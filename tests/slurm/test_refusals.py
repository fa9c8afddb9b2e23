"""Jobs that Slurm does not take: one clear line each, and exit code 5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.spec.cluster import NVLINK
from fsdpplan.spec.plan import Plan
from tests.slurm.breaking import kill
from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.user import User, small_plan

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster whose queue is full: one job waits in it, and Slurm keeps one place free."""
    if reason := missing():
        pytest.skip(reason)
    state = tmp_path_factory.mktemp("small") / "state"
    state.mkdir()
    cluster = SlurmCluster(state=state, nodes=1, cpus=2, gpus=0, name="small", max_jobs=2)
    try:
        cluster.start()
        held = cluster.run("sbatch", "--hold", "--wrap=true", cwd=state)
        assert held.returncode == 0, held.stderr
        yield cluster
    finally:
        cluster.stop()


def refusal(
    cluster: SlurmCluster,
    folder: Path,
    *options: str,
    path: Path | None = None,
    plan: Plan | None = None,
) -> str:
    """The one line that says why the job was not taken; `path` is looked at first for commands."""
    user = User(cluster=cluster, folder=folder, path=path)
    user.emit(plan or small_plan(nodes=1), *options)
    ended = user.run().end(seconds=200)
    assert ended.code == 5, ended.output
    assert "Traceback" not in ended.output
    # before it stands where the log is, and, on a busy machine, what is being done
    *_, line = ended.output.splitlines()
    assert line.startswith("fsdpplan: ")
    return line


def test_an_unknown_partition(slurm: SlurmCluster, tmp_path: Path) -> None:
    line = refusal(slurm, tmp_path, "--partition=nowhere")
    assert "partition" in line
    assert "--partition" in line


def joined_nodes() -> Plan:
    """Two nodes that one NVLink domain joins, as far as the plan knows."""
    plan = small_plan(nodes=2)
    domain = replace(plan.cluster.levels[-1], name=NVLINK)
    return replace(plan, cluster=replace(plan.cluster, levels=(domain,)))


def test_a_slurm_that_knows_no_segments(slurm: SlurmCluster, tmp_path: Path) -> None:
    help_text = slurm.run("sbatch", "--help", cwd=tmp_path).stdout
    if "--segment" in help_text:
        pytest.skip("this Slurm has --segment: what an older one says was not seen")
    line = refusal(slurm, tmp_path, plan=joined_nodes())
    assert "--no-segment" in line
    user = User(cluster=slurm, folder=tmp_path)
    user.emit(joined_nodes(), "--no-segment")
    tried = slurm.run("sbatch", "--test-only", "job.sbatch", cwd=tmp_path)
    assert tried.returncode == 0, tried.stderr


def test_a_full_queue(small: SlurmCluster, tmp_path: Path) -> None:
    line = refusal(small, tmp_path)
    assert "full" in line or "limit" in line


def test_an_sbatch_that_fails(slurm: SlurmCluster, tmp_path: Path) -> None:
    wrapper = tmp_path / "bin/sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        "echo 'sbatch: error: the site wants another day' >&2\nexit 1\n"
    )
    wrapper.chmod(0o755)
    line = refusal(slurm, tmp_path, path=wrapper.parent)
    assert "the site wants another day" in line


def test_a_controller_that_is_gone(small: SlurmCluster, tmp_path: Path) -> None:
    """Last, since nobody starts it again."""
    pid = int((small.state / "run/slurmctld.pid").read_text())
    kill([pid])
    line = refusal(small, tmp_path)
    assert "controller" in line
