"""What runs tell of saving checkpoints: how fast the storage took them, and how long training stood
still."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from fsdpplan.cost.goodput import rank_checkpoint_bytes
from fsdpplan.cost.kernels.optimizer import link_bytes_per_second
from fsdpplan.cost.reshard import checkpoint_bytes
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.ledger import LedgerRow
from fsdpplan.spec.plan import Case

IN_PLACE_FRACTION = 0.9
"""A save that stopped training for as much of its time was written in the step's place."""
MOST_RUNS = 16
"""Newest ones that count: storage changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSaves:
    """Of runs on machines like those that are asked about."""

    runs: int
    write_bytes_per_second: float
    """What the job that is asked about writes at least."""
    save_seconds: float | None
    """In which a save in the background held all ranks beside the copy; None: none was such."""


def measured_saves(rows: Iterable[LedgerRow], cluster: Cluster) -> MeasuredSaves | None:
    """What `rows`, oldest first, tell of a job on `cluster`; None: nothing.

    Storage is shared: more nodes than were measured write as fast together as these did, fewer
    their share of it.
    """
    told = [row for row in rows if _tells(row, cluster)][-MOST_RUNS:]
    if not told:
        return None
    held = [
        seconds for row in told if (seconds := _held_seconds(row, _case(row, cluster))) is not None
    ]
    return MeasuredSaves(
        runs=len(told),
        write_bytes_per_second=median(_written_bytes_per_second(row, cluster) for row in told),
        save_seconds=median(held) if held else None,
    )


def _tells(row: LedgerRow, cluster: Cluster) -> bool:
    observed = row.observed
    return (
        bool(observed.checkpoints)
        and bool(observed.checkpoint_seconds)
        and observed.checkpoint_blocking_seconds is not None
        and row.machines.are_of(cluster)
    )


def _case(row: LedgerRow, cluster: Cluster) -> Case:
    """What the run trained, on machines like its own."""
    job = row.job
    return Case(model=job.model, cluster=cluster, training=job.training, layout=job.layout)


def _written_bytes_per_second(row: LedgerRow, cluster: Cluster) -> float:
    observed, nodes = row.observed, row.machines.gpus / row.machines.gpus_per_node
    assert observed.checkpoint_seconds is not None
    blocking = observed.checkpoint_blocking_seconds or 0.0
    behind = observed.checkpoint_seconds - (0.0 if _in_place(row) else blocking)
    written = checkpoint_bytes(_case(row, cluster)) / behind
    return written * min(1.0, cluster.nodes / nodes)


def _in_place(row: LedgerRow) -> bool:
    observed = row.observed
    blocking, all_of_it = observed.checkpoint_blocking_seconds, observed.checkpoint_seconds
    return (blocking or 0.0) >= IN_PLACE_FRACTION * (all_of_it or 0.0)


def _held_seconds(row: LedgerRow, case: Case) -> float | None:
    if _in_place(row):
        return None
    copying = rank_checkpoint_bytes(case) / link_bytes_per_second(case.cluster)
    return max(0.0, (row.observed.checkpoint_blocking_seconds or 0.0) - copying)
