"""Finished jobs: the ledger's rows that tell of a cluster, those of one job as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from fsdpplan.errors import FsdpPlanError
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.ledger import Job, LedgerRow, Machines
from fsdpplan.validate.learned_search import FinishedJob, profile_times

LEAST_RUNS = 3
"""Fewer change nothing: one of them may be the odd one."""
MOST_JOBS = 40
"""The newest are asked; a cluster that was repaired years ago is another."""


def finished_jobs(rows: Sequence[LedgerRow], cluster: Cluster) -> tuple[FinishedJob, ...]:
    """Jobs that ran on some of `cluster`, which has the profile's numbers; none below three runs.

    What was measured is kept, what was predicted is not: it is predicted again with today's
    profile and cost model.
    """
    alike: dict[str, list[LedgerRow]] = {}
    for row in rows:
        if row.tells_speed and row.machines.are_of(cluster):
            key = repr((row.job, row.machines.gpus, row.machines.gpus_per_node))
            # Popped first: the order of the jobs is that of their newest runs.
            alike[key] = [*alike.pop(key, []), row]
    newest = list(alike.values())[-MOST_JOBS:]
    jobs = (_finished(group, cluster) for group in newest)
    found = tuple(job for job in jobs if job is not None)
    return found if sum(job.runs for job in found) >= LEAST_RUNS else ()


def _finished(rows: Sequence[LedgerRow], cluster: Cluster) -> FinishedJob | None:
    """One job, or None where today's cost model cannot predict it."""
    job: Job = rows[0].job
    found = FinishedJob(
        model=job.model,
        training=job.training,
        layout=job.layout,
        cluster=_ran_on(rows[0].machines, cluster),
        step_seconds=median(row.observed.step_seconds or 0.0 for row in rows),
        runs=len(rows),
    )
    try:
        profile_times([found])
    except FsdpPlanError:
        return None
    return found


def _ran_on(machines: Machines, cluster: Cluster) -> Cluster:
    """The part of `cluster` that a row ran on, with the cluster's own numbers of its links."""
    ours = (*cluster.levels, *machines.levels[len(cluster.levels) :])
    levels = tuple(
        replace(level, domain_gpus=theirs.domain_gpus)
        for level, theirs in zip(ours, machines.levels, strict=False)
    )
    return replace(cluster, gpus=machines.gpus, gpus_per_node=machines.gpus_per_node, levels=levels)
