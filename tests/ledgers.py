"""Ledger rows, and a cluster whose true constants are not its profile's."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product
from math import exp
from typing import Any

from fsdpplan.cost.estimate import estimate
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.ledger import LedgerRow, Machines, Observed, Predicted, Workload
from fsdpplan.spec.plan import Case, Estimate
from fsdpplan.spec.training import Training

PROFILE = "dgx-h100"


@cache
def cluster_of(gpus: int) -> Cluster:
    """As the profile has it."""
    return load_cluster(PROFILE, gpus=gpus).cluster


def as_it_is(cluster: Cluster) -> Cluster:
    """The same machines as they really are: matmuls at 0.85 of the profile's rate, links at 0.7."""
    fit = replace(cluster.device.fit, matmul_fraction=0.85 * cluster.device.fit.matmul_fraction)
    levels = tuple(
        replace(
            level,
            bandwidth_fraction=0.7 * level.bandwidth_fraction,
            multicast_fraction=0.7 * level.multicast_fraction,
        )
        for level in cluster.levels
    )
    return replace(cluster, device=replace(cluster.device, fit=fit), levels=levels)


@cache
def jobs() -> tuple[tuple[Workload, int], ...]:
    """(job, GPUs): models, sizes and policies that differ in what they wait for."""
    found = []
    for name, gpus, micro_batch, reshard, recompute in product(
        ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
        (8, 16, 64),
        (1, 4),
        ("always", "never"),
        ("none", "full"),
    ):
        for replicas in {1, max(1, gpus // 8)}:
            layout = Layout(
                dp_replicate=replicas,
                dp_shard=gpus // replicas,
                micro_batch=micro_batch,
                reshard_after_forward=reshard,  # type: ignore[arg-type]
                activation_checkpointing=recompute,  # type: ignore[arg-type]
            )
            training = Training(seq_len=2048, global_batch=layout.global_batch)
            job = Workload(model=load_model(name), training=training, layout=layout)
            found.append((job, gpus))
    return tuple(found)


@cache
def predicted(job: Workload, cluster: Cluster) -> Estimate:
    """What the cost model says of a job there."""
    return estimate(
        Case(model=job.model, cluster=cluster, training=job.training, layout=job.layout)
    )


def measured_seconds(job: Workload, gpus: int, chance: random.Random, *, outliers: bool) -> float:
    """What the simulated machines take: 3 % of noise, and one run in ten disturbed."""
    seconds = predicted(job, as_it_is(cluster_of(gpus))).step_seconds.expected
    disturbed = chance.uniform(1.2, 2.0) if outliers and chance.random() < 0.1 else 1.0
    return seconds * exp(chance.gauss(0, 0.03)) * disturbed


def row_of(
    job: Workload, cluster: Cluster, seconds: float | None, *, steps: int = 20, **more: Any
) -> LedgerRow:
    """The row of a run of `job` that took `seconds` a step."""
    said = predicted(job, cluster)
    observed: dict[str, Any] = {
        "steps": steps + 5,
        "measured_steps": steps,
        "step_seconds": seconds,
        "tokens_per_second": None,
        "mfu_fraction": None,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "memory_kind": "allocator",
        "exit_code": 0,
        "failure": None,
    }
    return LedgerRow(
        ended_at="2026-01-02T03:04:05+00:00",
        plan_sha256="0" * 64,
        run_folder="fsdpplan-runs/20260102-030405",
        target="slurm",
        job=job,
        machines=Machines.of(cluster),
        predicted=Predicted(
            step_seconds=said.step_seconds,
            time=said.time,
            mfu_fraction=said.mfu_fraction,
            peak_allocated_bytes=said.memory.peak_allocated_bytes,
            peak_reserved_bytes=said.memory.peak_reserved_bytes,
            corrected_by_runs=0,
        ),
        observed=Observed(**{**observed, **more}),
        versions=(("fsdpplan", "0.1.0"), ("torch", "2.13.0")),
    )


def rows_of_a_slow_cluster(number: int, *, seed: int = 0, outliers: bool = True) -> list[LedgerRow]:
    """Runs of different jobs on the simulated machines."""
    chance = random.Random(seed)
    return [
        row_of(job, cluster_of(gpus), measured_seconds(job, gpus, chance, outliers=outliers))
        for job, gpus in chance.sample(jobs(), number)
    ]
