"""Step: everything put together for one layout: time, memory, communication, rates and the band.

The band is the device profile's 80 % band for the kind of evidence behind its fitted numbers.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.cost.band import step_interval
from fsdpplan.cost.kernels.recomputed import repeated_products
from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.cost.model.flops import (
    attention_forward_flops_per_token,
    mfu_fraction,
    useful_flops_per_token,
)
from fsdpplan.cost.model.shards import block_cases, whole_model
from fsdpplan.cost.overlap.exposed import bottleneck
from fsdpplan.cost.overlap.timing import block_work
from fsdpplan.cost.schedule.stages import pipeline_stages
from fsdpplan.cost.step_time import step_time
from fsdpplan.spec.case import Case
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


def trainer_builds(*, model: Model, seq_len: int) -> bool:
    """Whether the reference decoder has this shape for sequences of `seq_len` tokens.

    It is any shape that a model can have: but rotation turns pairs, and a position table ends. The
    trainer refuses the others in words (trainer/parallel/support.py); a test holds both together.
    """
    if model.positions == "learned":
        return seq_len <= model.max_positions
    turned = model.latent.rope_head_dim if model.latent else model.head_dim
    return model.positions != "rope" or turned % 2 == 0


def estimate(case: Case) -> Estimate:
    """Predict time, memory and communication of a case, which must be legal."""
    model, cluster, training = case.model, case.cluster, case.training
    rank = rank_memory(case)
    step = step_time(case)
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
        hfu_fraction=mfu * executed_flops_ratio(case),
        bottleneck=bottleneck(time, communication),
        runnable=is_runnable(training=training, layout=case.layout)
        and trainer_builds(model=model, seq_len=training.seq_len),
        time=time,
        memory=rank,
        communication=communication,
    )


def is_runnable(*, training: Training, layout: Layout) -> bool:
    """Whether the trainer can run a legal `layout`, if it can build the model: it is FSDP2's."""
    return training.runtime == "fsdp2" and layout.sharding in ("ddp", "fsdp")


def executed_flops_ratio(case: Case) -> float:
    """Executed over useful FLOPs: recomputation counts here, and the head's padded rows."""
    model, layout = case.model, case.layout
    useful = useful_flops_per_token(model=model, seq_len=case.training.seq_len)
    is_same = layout.checkpoint_blocks == "all"
    stages = (whole_model(model),) if is_same else pipeline_stages(model=model, layout=layout)
    again = sum(
        blocks * _repeated_flops_per_token(own)
        for stage in stages
        for own, blocks in block_cases(case, stage)
    )
    padded = model.vocab_rows(layout.tp) - model.vocab
    return 1 + (again + 6.0 * padded * model.hidden) / useful


def _repeated_flops_per_token(case: Case) -> float:
    """FLOPs of one block's forward that backward repeats, a token; as in `recompute_seconds`."""
    work = block_work(case)
    products = repeated_products(replace(work, tp=1, ep=1))
    again = sum(product.flops / work.tokens for product in products)
    attention = attention_forward_flops_per_token(model=case.model, seq_len=case.training.seq_len)
    repeats_attention = case.layout.activation_checkpointing in ("attention", "full")
    return again + (attention if repeats_attention else 0.0)
