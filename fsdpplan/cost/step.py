"""Step: everything put together for one layout: time, memory, communication, rates and the band.

The band is the device profile's 80 % band for the kind of evidence behind its fitted numbers.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.cost import memory, pipeline_stages
from fsdpplan.cost.band import step_interval
from fsdpplan.cost.buildable import trainer_builds
from fsdpplan.cost.exposed import bottleneck
from fsdpplan.cost.flops import (
    attention_forward_flops_per_token,
    mfu_fraction,
    useful_flops_per_token,
)
from fsdpplan.cost.recomputed import repeated_products
from fsdpplan.cost.shards import Stage, block_layouts, whole_model
from fsdpplan.cost.step_time import step_time
from fsdpplan.cost.timing import block_work
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Estimate, MemoryBreakdown
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


def estimate(*, model: Model, cluster: Cluster, training: Training, layout: Layout) -> Estimate:
    """Predict time, memory and communication of `layout`, which must be legal."""
    rank = rank_memory(model=model, cluster=cluster, training=training, layout=layout)
    step = step_time(model=model, cluster=cluster, training=training, layout=layout)
    time, communication = step.time, step.communication
    seconds = time.total_seconds
    tokens_per_second = training.tokens_per_step / seconds
    per_gpu = tokens_per_second / cluster.gpus
    mfu = mfu_fraction(
        model=model,
        seq_len=training.seq_len,
        tokens_per_second_per_gpu=per_gpu,
        peak_flops_per_second=cluster.device.peak_flops_per_second(training.precision),
    )
    return Estimate(
        step_seconds=step_interval(time, cluster.device.error),
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=per_gpu,
        mfu_fraction=mfu,
        hfu_fraction=mfu * executed_flops_ratio(model=model, training=training, layout=layout),
        bottleneck=bottleneck(time, communication),
        runnable=is_runnable(training=training, layout=layout)
        and trainer_builds(model=model, seq_len=training.seq_len),
        time=time,
        memory=rank,
        communication=communication,
    )


def is_runnable(*, training: Training, layout: Layout) -> bool:
    """Whether the trainer can run a legal `layout`, if it can build the model: it is FSDP2's."""
    return training.runtime == "fsdp2" and layout.sharding in ("ddp", "fsdp")


def pipeline_ranks(model: Model, layout: Layout) -> tuple[Stage, ...]:
    """What each pipeline rank holds, over all its virtual stages."""
    return pipeline_stages.pipeline_ranks(model=model, layout=layout)


def rank_memory(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> MemoryBreakdown:
    """Memory of the fullest pipeline rank, and the peaks of all of them."""
    return memory.rank_memory(model=model, cluster=cluster, training=training, layout=layout)


def in_flight_blocks(model: Model, layout: Layout) -> tuple[int, ...]:
    """For each pipeline rank, (micro-batch, block) pairs alive at its schedule's worst moment."""
    return pipeline_stages.in_flight_blocks(model=model, layout=layout)


def executed_flops_ratio(*, model: Model, training: Training, layout: Layout) -> float:
    """Executed over useful FLOPs: recomputation counts here."""
    useful = useful_flops_per_token(model=model, seq_len=training.seq_len)
    is_same = layout.checkpoint_blocks == "all"
    stages = (
        (whole_model(model),)
        if is_same
        else pipeline_stages.pipeline_stages(model=model, layout=layout)
    )
    again = sum(
        blocks * _repeated_flops_per_token(kind, training, own)
        for stage in stages
        for kind, own, blocks in block_layouts(model=model, layout=layout, stage=stage)
    )
    return 1 + again / useful


def _repeated_flops_per_token(model: Model, training: Training, layout: Layout) -> float:
    """FLOPs of one block's forward that backward repeats, a token; as in `recompute_seconds`."""
    work = block_work(model=model, training=training, layout=layout)
    products = repeated_products(replace(work, tp=1, ep=1))
    again = sum(product.flops / work.tokens for product in products)
    attention = attention_forward_flops_per_token(model=model, seq_len=training.seq_len)
    return again + (attention if layout.activation_checkpointing in ("attention", "full") else 0.0)
