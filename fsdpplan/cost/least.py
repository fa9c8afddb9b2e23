"""Least: what a step takes at the least, for a search that prices as little as it can.

Both bounds cost a tenth of an estimate, or less, and are below it: tests hold them to that.
"""

from __future__ import annotations

from itertools import accumulate

from fsdpplan.cost.calls import group_seconds
from fsdpplan.cost.fsdp_timing import fsdp_micro_batch
from fsdpplan.cost.groups import pp_group
from fsdpplan.cost.passes import plain_seconds
from fsdpplan.cost.pipeline_stages import layout_rank_stages, pipeline_ranks, pipeline_stages
from fsdpplan.cost.shards import Stage, gradient_syncs
from fsdpplan.cost.timing import gradient_seconds, layout_optimizer_seconds, optimizer_elements
from fsdpplan.cost.traffic import message_bytes
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


def least_communication_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> float:
    """FSDP's gathers and reduce-scatters one after the other, as if nothing were computed.

        T >= m * (gathers + regathers) + syncs * reduce-scatters

    They queue on one communicator, so a step takes no less. 0 without FSDP, and in a pipeline,
    where they are few.
    """
    if layout.sharding != "fsdp" or layout.pp > 1:
        return 0.0
    (stage,) = pipeline_ranks(model=model, layout=layout)
    batch = fsdp_micro_batch(
        model=model, cluster=cluster, training=training, layout=layout, stage=stage
    )
    units = (*batch.runs, (batch.root, 1))
    gathers = sum(number * (unit.gather + unit.regather) for unit, number in units)
    reductions = sum(number * unit.reduce_scatter for unit, number in units)
    return layout.num_microbatches * gathers + gradient_syncs(layout) * reductions


def least_pipeline_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> float:
    """The rank for which work and waiting for its first and after its last micro-batch are most.

        T >= max over ranks r of (way to r + m * work of r + way back) + reduction of stage 0

    The way goes through the stages before the first one of r: forward, or FSDP's gather where that
    takes longer, a message to the next, and back where backward passes are not split. Then the
    first stage, the last to be done, reduces its gradients. 0 without a pipeline.
    """
    if layout.pp == 1:
        return 0.0
    common = {"model": model, "cluster": cluster, "training": training, "layout": layout}
    stages = pipeline_stages(model=model, layout=layout)
    found = {stage: plain_seconds(stage=stage, **common) for stage in dict.fromkeys(stages)}  # type: ignore[arg-type]
    waits = {stage: _stage_waits(stage, **common) for stage in dict.fromkeys(stages)}  # type: ignore[arg-type]
    size = message_bytes(model=model, training=training, layout=layout)
    send = group_seconds(cluster, pp_group(layout), "send_recv", size)
    is_split = layout.schedule in SPLIT_BACKWARD_SCHEDULES
    there = accumulate(
        (max(found[stage][0], waits[stage][0]) + send for stage in stages), initial=0.0
    )
    back = accumulate(
        (0.0 if is_split else found[stage][1] + send for stage in stages), initial=0.0
    )
    ways = [one + other for one, other in zip(there, back, strict=True)]
    longest = max(
        layout.num_microbatches * sum(sum(found[stages[index]]) for index in held) + ways[min(held)]
        for held in layout_rank_stages(layout)
    )
    return longest + (0.0 if is_split else waits[stages[0]][1])


def _stage_waits(
    stage: Stage, *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> tuple[float, float]:
    """(gathers, reductions) of a stage under FSDP; none otherwise, where they may be hidden."""
    if layout.sharding != "fsdp":
        return 0.0, 0.0
    batch = fsdp_micro_batch(
        model=model, cluster=cluster, training=training, layout=layout, stage=stage
    )
    units = (*batch.runs, (batch.root, 1))
    gathers = sum(number * unit.gather for unit, number in units)
    scatters = sum(number * unit.reduce_scatter for unit, number in units)
    reduces = sum(number * unit.all_reduce for unit, number in units)
    return gathers, max(scatters, reduces)


def least_update_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> float:
    """What gradients cost beside the passes, and the optimizer: each of the rank where it takes
    longest. They come on top of what the others here bound."""
    given = {"model": model, "training": training, "layout": layout}
    device = cluster.device
    held = dict.fromkeys(pipeline_ranks(model=model, layout=layout))
    gradients = (gradient_seconds(stage=stage, device=device, **given) for stage in held)  # type: ignore[arg-type]
    updates = (
        layout_optimizer_seconds(
            device=device,
            local_parameters=optimizer_elements(model=model, layout=layout, stage=stage),
            stage=stage,
            **given,  # type: ignore[arg-type]
        )
        for stage in held
    )
    return max(gradients) + max(updates)
