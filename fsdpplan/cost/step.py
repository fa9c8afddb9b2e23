"""Step: everything put together for one layout.

    step = compute + exposed communication + pipeline bubble + optimizer

Compute includes FSDP's copies and what overlapped collectives take from it. The band is the
device profile's 80 % band for the kind of evidence behind its fitted numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fsdpplan.cost.compute import projection_shapes
from fsdpplan.cost.exposed import ExposedSeconds, bottleneck, call_seconds, collective_costs
from fsdpplan.cost.flops import (
    attention_forward_flops_per_token,
    mfu_fraction,
    useful_flops_per_token,
)
from fsdpplan.cost.memory import stage_memory, state_bytes
from fsdpplan.cost.overlap import MicroBatch, ddp_exposed_seconds, fsdp_timeline
from fsdpplan.cost.pipeline import simulate_pipeline, stage_blocks
from fsdpplan.cost.pipeline_order import peak_in_flight
from fsdpplan.cost.shards import Stage
from fsdpplan.cost.timing import (
    block_work,
    ddp_bucket_seconds,
    fsdp_micro_batch,
    gradient_seconds,
    group_seconds,
    layout_block_seconds,
    layout_head_seconds,
    layout_optimizer_seconds,
    tp_block_seconds,
)
from fsdpplan.cost.traffic import Calls, activation_bytes, pp_group, step_calls
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import (
    Estimate,
    Interval,
    MemoryBreakdown,
    TimeBreakdown,
)
from fsdpplan.spec.layout import Layout, Schedule
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


def estimate(*, model: Model, cluster: Cluster, training: Training, layout: Layout) -> Estimate:
    """Predict time, memory and communication of `layout`, which must be legal."""
    stages = pipeline_ranks(model, layout)
    memory = rank_memory(model=model, cluster=cluster, training=training, layout=layout)
    busiest = stages[-1]
    calls = step_calls(model=model, training=training, layout=layout, stage=busiest)
    time, exposed = step_time(
        model=model, cluster=cluster, training=training, layout=layout, calls=calls
    )
    seconds = time.total_seconds
    fit = cluster.device.fit
    tokens_per_second = training.tokens_per_step / seconds
    per_gpu = tokens_per_second / cluster.gpus
    mfu = mfu_fraction(
        model=model,
        seq_len=training.seq_len,
        tokens_per_second_per_gpu=per_gpu,
        peak_flops_per_second=cluster.device.peak_flops_per_second(training.precision),
    )
    communication = collective_costs(
        calls, cluster=cluster, exposed=exposed, tp_exposed=layout.tp > 1
    )
    return Estimate(
        step_seconds=Interval(
            lower=seconds * fit.step_time_lower_fraction,
            expected=seconds,
            upper=seconds * fit.step_time_upper_fraction,
        ),
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=per_gpu,
        mfu_fraction=mfu,
        hfu_fraction=mfu * executed_flops_ratio(model=model, training=training, layout=layout),
        bottleneck=bottleneck(time, communication),
        runnable=is_runnable(training=training, layout=layout),
        time=time,
        memory=memory,
        communication=communication,
    )


def is_runnable(*, training: Training, layout: Layout) -> bool:
    """Whether today's trainer can run `layout`: the data-parallel family in bf16 or fp32."""
    return (
        layout.tp == layout.pp == layout.cp == layout.ep == 1
        and layout.sharding in ("ddp", "fsdp")
        and layout.activation_checkpointing in ("none", "op", "full")
        and training.precision in ("bf16", "fp32")
        and training.runtime == "fsdp2"
        and not (layout.sharding == "ddp" and layout.gradient_sync == "reduce_scatter_only")
    )


@lru_cache(maxsize=4096)
def _pipeline_ranks(layers: int, pp: int, virtual_stages: int) -> tuple[Stage, ...]:
    if pp == 1:
        return (Stage(blocks=layers, has_embedding=True, has_head=True),)
    per_stage = stage_blocks(layers=layers, stages=pp * virtual_stages)
    return tuple(
        Stage(
            blocks=sum(per_stage[rank::pp]),
            has_embedding=rank == 0,
            has_head=rank == pp - 1,
        )
        for rank in range(pp)
    )


def pipeline_ranks(model: Model, layout: Layout) -> tuple[Stage, ...]:
    """What each pipeline rank holds, over all its virtual stages."""
    return _pipeline_ranks(model.layers, layout.pp, layout.virtual_stages)


def rank_memory(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> MemoryBreakdown:
    """Memory of the fullest pipeline rank.

    That is the first (embedding, most micro-batches in flight), the second (it may hold one block
    more) or the last (head and logits): the others hold no more than the second.
    """
    stages = pipeline_ranks(model, layout)
    in_flight = in_flight_blocks(model, layout)
    breakdowns = [
        stage_memory(
            model=model,
            cluster=cluster,
            training=training,
            layout=layout,
            stage=stages[rank],
            in_flight_blocks=in_flight[rank],
        )
        for rank in sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    ]
    return max(breakdowns, key=lambda breakdown: breakdown.peak_allocated_bytes)


def in_flight_blocks(model: Model, layout: Layout) -> tuple[int, ...]:
    """For each pipeline rank, (micro-batch, block) pairs alive at its schedule's worst moment."""
    if layout.pp == 1:
        return (model.layers,)
    return _in_flight_blocks(
        model.layers,
        layout.schedule,
        layout.pp,
        layout.num_microbatches,
        layout.virtual_stages,
    )


@lru_cache(maxsize=4096)
def _in_flight_blocks(
    layers: int, schedule: Schedule, pp: int, num_microbatches: int, virtual_stages: int
) -> tuple[int, ...]:
    per_stage = stage_blocks(layers=layers, stages=pp * virtual_stages)
    alive = peak_in_flight(
        schedule=schedule,
        pp=pp,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
    )
    return tuple(
        max(
            sum(per_stage[rank::pp]),
            sum(
                micro_batches * blocks
                for micro_batches, blocks in zip(in_stage, per_stage[rank::pp], strict=True)
            ),
        )
        for rank, in_stage in enumerate(alive)
    )


def least_seconds(*, model: Model, cluster: Cluster, training: Training, layout: Layout) -> float:
    """A lower bound of the step: nothing exposed but tensor parallelism, and the least bubble.

    The last pipeline rank, which has the head, waits for the first micro-batch to come through
    the others and for its gradient to go back.
    """
    block = layout_block_seconds(
        model=model, device=cluster.device, training=training, layout=layout
    )
    per_block = block.forward + block.recompute + block.backward
    if layout.tp > 1:
        per_block += sum(
            tp_block_seconds(model=model, cluster=cluster, training=training, layout=layout)
        )
    head = sum(
        layout_head_seconds(model=model, device=cluster.device, training=training, layout=layout)
    )
    last = pipeline_ranks(model, layout)[-1]
    chunk_blocks = model.layers // (layout.pp * layout.virtual_stages)
    fill = (layout.pp - 1) * chunk_blocks * per_block
    return layout.num_microbatches * (last.blocks * per_block + head) + fill


def step_time(
    *,
    model: Model,
    cluster: Cluster,
    training: Training,
    layout: Layout,
    calls: list[Calls],
) -> tuple[TimeBreakdown, ExposedSeconds]:
    """Seconds of the step by part, and what data-parallel collectives leave exposed."""
    stage = pipeline_ranks(model, layout)[-1]
    optimizer = layout_optimizer_seconds(
        model=model,
        device=cluster.device,
        layout=layout,
        local_parameters=state_bytes(model=model, layout=layout, stage=stage) // 4,
    )
    common = {"model": model, "cluster": cluster, "training": training, "layout": layout}
    tp_total = sum(call_seconds(call, cluster) for call in calls if call.group.axis == "tp")
    in_blocks = layout.num_microbatches * stage.blocks * sum(tp_block_seconds(**common))  # type: ignore[arg-type]
    if layout.pp > 1:
        busy, bubble, exposed = _pipeline_seconds(**common)  # type: ignore[arg-type]
    elif layout.sharding == "fsdp":
        busy, exposed = _fsdp_seconds(stage=stage, **common)  # type: ignore[arg-type]
        bubble = 0.0
    else:
        busy, exposed = _ddp_seconds(stage=stage, **common)  # type: ignore[arg-type]
        bubble = 0.0
    hidden = sum(
        call_seconds(call, cluster)
        for call in calls
        if call.group.axis.startswith("dp") and call.call_bytes > 2**16
    )
    busy += gradient_seconds(
        model=model, training=training, layout=layout, stage=stage, device=cluster.device
    )
    slowdown = cluster.device.fit.overlap_slowdown_fraction * max(0.0, hidden - exposed.total)
    compute = max(0.0, busy - in_blocks) + min(slowdown, busy)
    return (
        TimeBreakdown(
            compute_seconds=compute,
            exposed_communication_seconds=exposed.total + tp_total,
            bubble_seconds=bubble,
            optimizer_seconds=optimizer,
        ),
        exposed,
    )


def _early(batch: MicroBatch, layout: Layout) -> MicroBatch:
    """A micro-batch before the last one, by the synchronisation policy."""
    match layout.gradient_sync:
        case "every":
            return batch
        case "reduce_scatter_only":
            silenced = {"all_reduce": 0.0}
        case "last":
            silenced = {"all_reduce": 0.0, "reduce_scatter": 0.0, "copy_in": 0.0}
    return replace(
        batch,
        unit=replace(batch.unit, **silenced),
        root=replace(batch.root, **silenced),
    )


def _fsdp_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout, stage: Stage
) -> tuple[float, ExposedSeconds]:
    """(busy compute stream, exposed) of all micro-batches."""
    batch = fsdp_micro_batch(
        model=model, cluster=cluster, training=training, layout=layout, stage=stage
    )
    timeline = fsdp_timeline(
        early=_early(batch, layout), last=batch, num_microbatches=layout.num_microbatches
    )
    exposed = ExposedSeconds(
        all_gather=timeline.gather_exposed,
        reduce_scatter=timeline.reduce_scatter_exposed,
        all_reduce=timeline.all_reduce_exposed,
    )
    return timeline.compute - timeline.exposed, exposed


def _plain_micro_batch_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout, stage: Stage
) -> tuple[float, float]:
    """(forward, backward) of one micro-batch on one rank, data-parallel collectives apart."""
    device = cluster.device
    block = layout_block_seconds(model=model, device=device, training=training, layout=layout)
    tp_forward, tp_backward = tp_block_seconds(
        model=model, cluster=cluster, training=training, layout=layout
    )
    head_forward, head_backward = (
        layout_head_seconds(model=model, device=device, training=training, layout=layout)
        if stage.has_head
        else (0.0, 0.0)
    )
    forward = stage.blocks * (block.forward + tp_forward) + head_forward
    backward = stage.blocks * (block.recompute + block.backward + tp_backward) + head_backward
    return forward, backward


def _ddp_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout, stage: Stage
) -> tuple[float, ExposedSeconds]:
    """(busy, exposed) of all micro-batches under DDP, or on one rank."""
    forward, backward = _plain_micro_batch_seconds(
        model=model, cluster=cluster, training=training, layout=layout, stage=stage
    )
    busy = layout.num_microbatches * (forward + backward)
    if layout.dp_replicate == 1:
        return busy, ExposedSeconds()
    seconds, sizes = ddp_bucket_seconds(
        model=model, cluster=cluster, training=training, layout=layout, stage=stage
    )
    once = ddp_exposed_seconds(
        bucket_seconds=seconds, bucket_bytes=sizes, backward_seconds=backward
    )
    syncs = 1 if layout.gradient_sync == "last" else layout.num_microbatches
    return busy, ExposedSeconds(all_reduce=once * syncs)


def _pipeline_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> tuple[float, float, ExposedSeconds]:
    """(busy, bubble, exposed) of a pipeline's last rank, which also has head and loss.

    With reshard never a rank gathers its units once, before its first micro-batch, and reduces
    once, after its last; only what the first forward and last backward hide is hidden.
    """
    stages = layout.pp * layout.virtual_stages
    per_stage = stage_blocks(layers=model.layers, stages=stages)
    times = [
        _plain_micro_batch_seconds(
            model=model,
            cluster=cluster,
            training=training,
            layout=layout,
            stage=Stage(blocks=blocks, has_embedding=index == 0, has_head=index == stages - 1),
        )
        for index, blocks in enumerate(per_stage)
    ]
    message = activation_bytes(model=model, training=training, layout=layout)
    timing = simulate_pipeline(
        schedule=layout.schedule,
        forward_seconds=tuple(forward for forward, _ in times),
        backward_seconds=tuple(backward for _, backward in times),
        num_microbatches=layout.num_microbatches,
        virtual_stages=layout.virtual_stages,
        send_seconds=group_seconds(
            cluster,
            pp_group(layout),
            "send_recv",
            message // layout.tp if layout.sequence_parallel else message,
        ),
    )
    busy = max(timing.busy_seconds)
    stage = pipeline_ranks(model, layout)[-1]
    once = replace(layout, num_microbatches=1)
    if layout.sharding == "fsdp":
        _, exposed = _fsdp_seconds(
            model=model, cluster=cluster, training=training, layout=once, stage=stage
        )
    else:
        _, exposed = _ddp_seconds(
            model=model, cluster=cluster, training=training, layout=once, stage=stage
        )
    return busy, timing.bubble_seconds, exposed


def executed_flops_ratio(*, model: Model, training: Training, layout: Layout) -> float:
    """Executed over useful FLOPs: recomputation counts here."""
    useful = useful_flops_per_token(model=model, seq_len=training.seq_len)
    work = block_work(model=model, training=training, layout=layout)
    attention = attention_forward_flops_per_token(model=model, seq_len=training.seq_len)
    shapes = projection_shapes(replace(work, tp=1))
    per_token = [2.0 * n * k for _, n, k in shapes]
    match layout.activation_checkpointing:
        case "none":
            again = 0.0
        case "attention":
            again = attention
        case "op":
            again = sum(per_token[1::2])
        case "full":
            again = sum(per_token[:-1]) + attention
    return 1 + model.layers * again / useful
