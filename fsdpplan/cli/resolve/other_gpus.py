"""A saved plan for other GPUs: the batch that they train, and the inputs of planning again."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.cli.options.files import EvidenceOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.options.replan import ReplanOptions
from fsdpplan.cli.resolve.again import A_FLAG, Asked, asked_again
from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan

OF_THE_NUMBER = ("dp_replicate", "dp_shard")
"""Degrees that follow the number of GPUs, so that what fixed them for the old one is not kept."""


def inputs_elsewhere(
    plan: Plan,
    *,
    options: ReplanOptions,
    cluster: ClusterOptions,
    layout: LayoutOptions,
    evidence: EvidenceOptions,
    global_batch: int | None = None,
) -> Inputs:
    """The plan's question on other machines, with its batch, or `global_batch`."""
    batch = _batch(plan, options, cluster) if global_batch is None else global_batch
    sources = dict(plan.sources)
    fixed = [
        name
        for name in OF_THE_NUMBER
        if sources.get(f"layout.{name}", "").startswith(A_FLAG) and getattr(layout, name) is None
    ]
    kept = tuple(pair for pair in plan.sources if pair[0] not in [f"layout.{n}" for n in fixed])
    found = asked_again(
        replace(plan, sources=kept),
        Asked(
            model=ModelOptions(),
            cluster=cluster,
            training=TrainingOptions(global_batch=batch),
            layout=layout,
            torch=TorchOptions(),
            evidence=evidence,
            free=bool(options.free),
        ),
    )
    words = ", ".join(f"--{name.replace('_', '-')} {getattr(plan.layout, name)}" for name in fixed)
    said = (f"{words} of the plan not kept: other GPUs, other copies (type it to keep it)",)
    return replace(found, assumptions=(*found.assumptions, *(said if fixed else ())))


def _batch(plan: Plan, options: ReplanOptions, cluster: ClusterOptions) -> int:
    before = plan.training.global_batch
    if options.global_batch is not None:
        if options.keep_global_batch:
            raise SpecError(
                f"--keep-global-batch keeps {before}, and --global-batch {options.global_batch} "
                "does not: leave one of them out"
            )
        return options.global_batch
    if options.keep_global_batch is False:
        return nearest_batch(before, cluster.gpus or plan.cluster.gpus)
    return before


def nearest_batch(batch: int, gpus: int) -> int:
    """The multiple of `gpus` that is nearest to `batch`: all can have their own sequences."""
    below = batch // gpus * gpus
    return max(gpus, below if batch - below <= below + gpus - batch else below + gpus)


def cannot_keep(inputs: Inputs) -> str:
    """Why a batch is not kept, and what would be near: batches that all GPUs share evenly, and the
    most GPUs, in whole nodes, that share this one."""
    gpus, batch = inputs.cluster.gpus, inputs.training.global_batch
    below = batch // gpus * gpus
    near = [
        f"--global-batch {one} ({(one / batch - 1) * 100:+.1f} %)"
        for one in (below, below + gpus)
        if one
    ]
    node = inputs.cluster.gpus_per_node
    fewer = next((n for n in range(gpus - gpus % node, 0, -node) if batch % n == 0), None)
    if fewer is not None:
        near.append(f"--gpus {fewer}")
    return (
        f"a global batch of {batch} sequences cannot be kept on {gpus} GPUs: no layout that may be "
        f"taken splits it; nearest: {', '.join(near)}"
    )
