"""One Slurm for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.stage import Pool, Stage
from tests.slurm.user import STEPS, reference_losses, small_plan


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Ten nodes of four CPUs, which claim eight GPUs each."""
    if reason := missing():
        pytest.skip(reason)
    state = tmp_path_factory.mktemp("slurm") / "state"
    state.mkdir()
    cluster = SlurmCluster(state=state, nodes=10, cpus=4, gpus=8, quotas=4)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def stage(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The cluster for several jobs at once, and what their losses have to be."""
    # One rank: the batch is the same one, however many share it.
    alone = tmp_path_factory.mktemp("alone")
    return Stage(
        cluster=slurm,
        folder=tmp_path_factory.mktemp("scenes"),
        undisturbed=reference_losses(alone, small_plan(nodes=1), steps=STEPS),
        nodes=Pool(slurm.node_names),
        quotas=Pool([str(slurm.state / f"quota/{number}") for number in range(slurm.quotas)]),
    )
