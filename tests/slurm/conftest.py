"""One Slurm for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SlurmCluster, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes of four CPUs, which claim eight GPUs each."""
    if reason := missing():
        pytest.skip(reason)
    state = tmp_path_factory.mktemp("slurm") / "state"
    state.mkdir()
    cluster = SlurmCluster(state=state, nodes=2, cpus=4, gpus=8)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
