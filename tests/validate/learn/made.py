"""Jobs for the tests of learning: one model on one cluster, in layouts and stacks of choice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from fsdpplan.cost.estimate import step_time
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.ledger import Workload
from fsdpplan.spec.plan import Case, TimeBreakdown
from fsdpplan.spec.training import Training
from fsdpplan.validate.learn.features import Stack, features_of
from fsdpplan.validate.learn.known import PricedRun

STACK = Stack(software="torchtitan", runtime="fsdp2", precision="bf16", device="h100-sxm-80g")


@cache
def _time(name: str, gpus: int, layout: Layout) -> TimeBreakdown:
    case = Case(
        model=load_model(name),
        cluster=load_cluster("dgx-h100", gpus=gpus).cluster,
        training=training(layout),
        layout=layout,
    )
    return step_time(case).time


def training(layout: Layout) -> Training:
    """A step of 4,096 tokens a sequence."""
    return Training(seq_len=4096, global_batch=layout.global_batch)


def made_run(
    factor: float,
    *,
    name: str = "llama-3.1-8b",
    gpus: int = 64,
    stack: Stack = STACK,
    **layout: Any,
) -> PricedRun:
    """A run that takes `factor` times what is predicted."""
    sharded = {"dp_shard": gpus // (layout.get("tp", 1) * layout.get("dp_replicate", 1))}
    one = Layout(**{**sharded, **layout})
    time = _time(name, gpus, one)
    job = Workload(model=load_model(name), training=training(one), layout=one)
    features = features_of(
        model=job.model, training=job.training, layout=one, gpus=gpus, time=time, stack=stack
    )
    return PricedRun(
        job=job, gpus=gpus, features=features, step_seconds=factor * time.total_seconds
    )


def of_other(**change: str) -> Stack:
    """`STACK` with something else."""
    return replace(STACK, **change)
