"""Which rows of the ledger tell of a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import WeakSpot
from fsdpplan.spec.ledger import LedgerRow, Machines
from fsdpplan.spec.weak import weakened
from fsdpplan.validate.finished_jobs import finished_jobs
from tests.ledgers import cluster_of, jobs, row_of

(JOB, GPUS), *_ = jobs()
CLUSTER = cluster_of(GPUS)


def rows(*seconds: float | None, **more: object) -> list[LedgerRow]:
    return [row_of(JOB, CLUSTER, one, **more) for one in seconds]  # type: ignore[arg-type]


def test_runs_of_one_job_are_one_by_their_median() -> None:
    (job,) = finished_jobs(rows(1.0, 9.0, 1.2), CLUSTER)
    assert (job.step_seconds, job.runs) == (1.2, 3)
    assert job.weight == pytest.approx(3**0.5)


@pytest.mark.parametrize(
    "silent",
    [
        rows(None, None, None),
        rows(1.0, 1.0, 1.0, steps=4),
        [replace(row, machines=replace(row.machines, is_weak=True)) for row in rows(1.0) * 3],
        [replace(row, machines=replace(row.machines, device="other")) for row in rows(1.0) * 3],
    ],
    ids=["no time", "few steps", "weak machines", "another device"],
)
def test_what_says_nothing_of_the_cluster_is_left_out(silent: list[LedgerRow]) -> None:
    assert finished_jobs(silent, CLUSTER) == ()


def test_a_run_on_one_node_tells_of_many_and_the_other_way_round() -> None:
    large = cluster_of(64)
    (small_job,) = finished_jobs(rows(1.0, 1.0, 1.0), large)
    assert small_job.cluster.gpus == GPUS
    assert len(small_job.cluster.levels) == 1
    big, gpus = next(one for one in jobs() if one[1] == 64)
    across = [row_of(big, cluster_of(gpus), 2.0)] * 3
    (large_job,) = finished_jobs(across, CLUSTER)
    assert large_job.cluster.levels == large.levels


def test_other_links_are_another_cluster() -> None:
    slower = load_cluster("dgx-h100", gpus=GPUS, intra_bandwidth_bytes_per_second=1e11).cluster
    assert finished_jobs(rows(1.0, 1.0, 1.0), slower) == ()


def test_weak_nodes_make_another_cluster() -> None:
    large = cluster_of(64)
    spot = WeakSpot(nodes=("n1",), level="infiniband", remaining_fraction=0.5, text="slow")
    assert Machines.of(weakened(large, [spot])).is_weak
    assert finished_jobs(rows(1.0, 1.0, 1.0), weakened(large, [spot])) == ()
