"""Gradients: seconds of what they cost beside the products that make them, and their reductions."""

from __future__ import annotations

from fsdpplan.cost.kernels.rates import memory_bytes_per_second
from fsdpplan.cost.model.formats import (
    KERNELS_PER_COLUMN,
    KERNELS_PER_MATRIX,
    TRAFFIC_BYTES_PER_ELEMENT,
    formats,
    low_rank,
)
from fsdpplan.cost.model.shards import (
    Stage,
    gradient_syncs,
    stage_elements,
    stage_shapes,
)
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import DTYPE_BYTES


def gradient_seconds(case: Case, stage: Stage) -> float:
    """What gradients cost in a step beyond the products that make them and FSDP's copies.

    Each micro-batch after the first adds its gradients to the kept ones: both are read, one is
    written. What is kept is whole under DDP and ZeRO and without reduction until the last
    micro-batch, a shard otherwise. DDP also copies gradients, divided, into its buckets when it
    reduces. Where parameters are in half precision, so are new gradients; fp32 ones that they are
    added to take every micro-batch, unless the product itself adds (fused kernels).
    """
    training, layout = case.training, case.layout
    whole = stage_elements(model=case.model, stage=stage, tp=layout.tp, ep=layout.ep)
    again = layout.num_microbatches - 1
    traits = training.traits
    of = formats(training=training, layout=layout)
    if layout.sharding == "fsdp" and layout.gradient_sync == "last":
        kept_bytes = DTYPE_BYTES[training.reduce_dtype]
        made_bytes = DTYPE_BYTES[training.activation_dtype]
        if traits.gathers_fp32:
            made_bytes = DTYPE_BYTES["fp32"]
        traffic = (2 * kept_bytes + made_bytes) * again * whole
    elif layout.offload == "cpu" and layout.gradient_sync == "every":
        traffic = 0  # the host adds (`host`), and the passes wait for it
    elif layout.sharding == "fsdp":
        traffic = 3 * of.kept_gradient * again * whole // layout.shard_ranks
    elif traits.half_gradients:
        traffic = 6 * again * whole
    elif traits.half_parameters:
        traffic = 0 if traits.fused_kernels else 10 * layout.num_microbatches * whole
    else:
        is_copied = layout.dp_replicate * layout.shard_ranks > 1
        copies = gradient_syncs(layout) if is_copied else 0
        traffic = (3 * again + 2 * copies) * of.kept_gradient * whole
        if training.powersgd_rank and is_copied:
            return copies * compression_seconds(case, stage) + traffic / memory_bytes_per_second(
                case.cluster.device
            )
    return traffic / memory_bytes_per_second(case.cluster.device)


def compression_seconds(case: Case, stage: Stage) -> float:
    """PowerSGD of all gradients of a rank, beside its collectives, by bytes and by launches:

        T = 44 n / B + launches (3 matrices + 12 r matrices)

    Products with matrices of so few columns wait for memory. Assumes that launches and memory do
    not overlap, as in a hook that waits for the device after each bucket.
    """
    device, rank = case.cluster.device, case.training.powersgd_rank
    sent = low_rank(stage_shapes(case.model, stage), rank)
    launches = sent.matrices * (KERNELS_PER_MATRIX + rank * KERNELS_PER_COLUMN)
    traffic = TRAFFIC_BYTES_PER_ELEMENT * (sent.compressed + sent.whole)
    moved = traffic / memory_bytes_per_second(device)
    return moved + launches * device.fit.kernel_launch_seconds
