"""What runs tell of saving checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.goodput import checkpoint_bytes, rank_checkpoint_bytes
from fsdpplan.cost.kernels.optimizer import link_bytes_per_second
from fsdpplan.spec.ledger import LedgerRow
from fsdpplan.spec.plan import Case
from fsdpplan.validate.learn.saves import measured_saves
from tests.ledgers import cluster_of
from tests.validate.learn.saves import a_row, with_saves


def case_of(row: LedgerRow) -> Case:
    job, cluster = row.job, cluster_of(row.machines.gpus)
    return Case(model=job.model, cluster=cluster, training=job.training, layout=job.layout)


def test_bandwidth_is_what_was_written_behind_the_stop() -> None:
    row = a_row(16)
    case = case_of(row)
    found = measured_saves([with_saves(row, seconds=22.0, blocking=2.0)], case.cluster)
    assert found is not None
    assert found.write_bytes_per_second == pytest.approx(checkpoint_bytes(case) / 20.0)
    copying = rank_checkpoint_bytes(case) / link_bytes_per_second(case.cluster)
    assert found.save_seconds == pytest.approx(2.0 - copying)


def test_a_save_in_the_steps_place_says_nothing_of_one_in_the_background() -> None:
    row = a_row(16)
    found = measured_saves([with_saves(row, seconds=20.0, blocking=20.0)], cluster_of(16))
    assert found is not None
    assert found.write_bytes_per_second == pytest.approx(checkpoint_bytes(case_of(row)) / 20.0)
    assert found.save_seconds is None


def test_storage_is_shared_by_more_nodes_and_left_to_fewer() -> None:
    row = with_saves(a_row(16), seconds=22.0, blocking=2.0)
    here, more, fewer = (measured_saves([row], cluster_of(gpus)) for gpus in (16, 64, 8))
    assert here is not None
    assert more is not None
    assert fewer is not None
    assert more.write_bytes_per_second == here.write_bytes_per_second
    assert fewer.write_bytes_per_second == pytest.approx(here.write_bytes_per_second / 2)


def test_runs_without_saves_or_on_other_machines_tell_nothing() -> None:
    row = a_row(16)
    assert measured_saves([row], cluster_of(16)) is None
    elsewhere = replace(
        with_saves(row, seconds=9.0, blocking=1.0),
        machines=replace(row.machines, device="another"),
    )
    assert measured_saves([elsewhere], cluster_of(16)) is None
