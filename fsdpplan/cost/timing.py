"""Timing: from a layout to the seconds that the stream simulation needs.

This module only translates: shapes to block times, groups to collective times. The simulation is
in `overlap` and `pipeline`, the sum in `step`.
"""

from __future__ import annotations

from functools import lru_cache

from fsdpplan.cost.collectives import Collective, collective_seconds
from fsdpplan.cost.compute import (
    BlockSeconds,
    BlockWork,
    block_seconds,
    head_seconds,
    memory_bytes_per_second,
    optimizer_seconds,
)
from fsdpplan.cost.ddp import ddp_buckets_bytes
from fsdpplan.cost.overlap import MicroBatch, UnitSeconds
from fsdpplan.cost.params import block_tensors
from fsdpplan.cost.placement import group_placement
from fsdpplan.cost.shards import (
    Stage,
    UnitSize,
    block_size,
    gradient_syncs,
    root_size,
    stage_elements,
    unit_blocks,
)
from fsdpplan.cost.sizes import formats, local_tokens
from fsdpplan.cost.traffic import (
    Group,
    activation_bytes,
    regather_group,
    replicate_group,
    shard_group,
    tp_block_calls,
    tp_group,
)
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES, Training

FSDP_UNIT_OPERATORS = 15.0
"""Operators that FSDP2 dispatches for one unit in each of forward and backward: allocations,
copies, collectives. Counted on the trainer's step (tests/ground_truth, torch 2.13, reshard always):
27 in both for a block of 9 parameters, 32 for one of 16. Left out: what its Python hooks cost."""

DDP_PARAMETER_OPERATORS = 0.5
"""DDP's reducer divides each gradient once in backward: half an operator in each pass. Read off
torch's reducer, not measured."""


@lru_cache(maxsize=16384)
def group_seconds(cluster: Cluster, group: Group, collective: Collective, call_bytes: int) -> float:
    """Seconds of one call of `collective` over `group`."""
    if group.ranks == 1:
        return 0.0
    placement = group_placement(cluster=cluster, ranks=group.ranks, stride=group.stride)
    return collective_seconds(collective=collective, gathered_bytes=call_bytes, placement=placement)


@lru_cache(maxsize=4096)
def group_level(cluster: Cluster, group: Group) -> str:
    """Outermost level of the network that `group` spans."""
    return group_placement(cluster=cluster, ranks=group.ranks, stride=group.stride).level_name


def is_autocast(*, training: Training, layout: Layout) -> bool:
    """Whether blocks cast fp32 weights in each forward, instead of being handed cast ones."""
    if training.precision == "fp32":
        return False
    return layout.sharding == "ddp" or training.runtime == "autocast"


def block_work(*, model: Model, training: Training, layout: Layout) -> BlockWork:
    """What one block computes for one micro-batch on one rank."""
    if layout.sharding == "fsdp":
        wrapper = FSDP_UNIT_OPERATORS / layout.wrap_blocks
    elif layout.dp_replicate > 1:
        wrapper = DDP_PARAMETER_OPERATORS * len(block_tensors(model))
    else:
        wrapper = 0.0
    return BlockWork(
        model=model,
        tokens=local_tokens(training=training, layout=layout),
        seq_len=training.seq_len,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        precision=training.precision,
        mode=layout.activation_checkpointing,
        compiled=layout.compile,
        autocast=is_autocast(training=training, layout=layout),
        residual_bytes=formats(training=training, layout=layout).residual,
        wrapper_operators=wrapper,
    )


def layout_block_seconds(
    *, model: Model, device: Device, training: Training, layout: Layout
) -> BlockSeconds:
    """Compute seconds of one block for one micro-batch on one rank."""
    return block_seconds(block_work(model=model, training=training, layout=layout), device)


def layout_head_seconds(
    *, model: Model, device: Device, training: Training, layout: Layout
) -> tuple[float, float]:
    """(forward, backward) seconds of head and loss for one micro-batch on one rank."""
    return head_seconds(
        model=model,
        tokens=local_tokens(training=training, layout=layout),
        vocab=-(-model.vocab // layout.tp),
        precision=training.precision,
        device=device,
    )


def tp_block_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout
) -> tuple[float, float]:
    """(forward, backward) seconds of one block's tensor-parallel collectives: all exposed.

    The matmul that needs a gathered input waits for it; without async TP nothing hides it.
    """
    if layout.tp == 1:
        return 0.0, 0.0
    size = activation_bytes(model=model, training=training, layout=layout)
    group = tp_group(layout)
    gather = group_seconds(cluster, group, "all_gather", size)
    scatter = group_seconds(cluster, group, "reduce_scatter", size)
    forward, backward = tp_block_calls(layout)
    recomputes = layout.activation_checkpointing in ("op", "full")
    again = 2 * gather + scatter if recomputes else 0.0
    return forward * (gather + scatter), backward * (gather + scatter) + again


def copy_seconds(size: UnitSize, *, training: Training, device: Device) -> tuple[float, float]:
    """(copy-out, copy-in) of one unit: read and write of its gathered parameters, and of its
    gradients into the reduce dtype.

    Under `autocast` the unit is one flat parameter, as FSDP1 has it: gathered in place, so nothing
    is copied out, and its gradients are divided by the ranks before the reduction.
    Source: torch 2.13 torch/distributed/fsdp/_flat_param.py and _runtime_utils.py.
    """
    memory = memory_bytes_per_second(device)
    element_bytes = DTYPE_BYTES[training.gathered_dtype]
    reduce_bytes = DTYPE_BYTES[training.reduce_dtype]
    copy_in = (element_bytes + reduce_bytes) * size.padded_elements / memory
    if training.runtime == "autocast":
        return 0.0, copy_in
    return 2 * element_bytes * size.padded_elements / memory, copy_in


def flat_gradient_seconds(size: UnitSize, *, training: Training, device: Device) -> float:
    """A flat parameter's gradients concatenated in backward: autograd's inverse of its split.

    37 `CatArrayBatchedCopy` kernels in a published profile of FSDP1 on 36 blocks; FSDP2 has none.
    """
    if training.runtime != "autocast":
        return 0.0
    return 2 * DTYPE_BYTES["fp32"] * size.padded_elements / memory_bytes_per_second(device)


def gradient_seconds(
    *, model: Model, training: Training, layout: Layout, stage: Stage, device: Device
) -> float:
    """What gradients cost in a step beyond the products that make them and FSDP's copies.

    Each micro-batch after the first adds its gradients to the kept ones: both are read, one is
    written. What is kept is whole under DDP and without reduction until the last micro-batch, a
    shard otherwise. DDP also copies gradients, divided, into its buckets when it reduces.
    """
    whole = stage_elements(model=model, stage=stage, tp=layout.tp)
    again = layout.num_microbatches - 1
    if layout.sharding == "ddp":
        copies = gradient_syncs(layout) if layout.dp_replicate > 1 else 0
        traffic = (12 * again + 8 * copies) * whole
    elif layout.gradient_sync == "last":
        kept_bytes = DTYPE_BYTES[training.reduce_dtype]
        traffic = (2 * kept_bytes + DTYPE_BYTES[training.gathered_dtype]) * again * whole
    else:
        traffic = 12 * again * whole // layout.shard_ranks
    return traffic / memory_bytes_per_second(device)


def fsdp_unit_seconds(
    size: UnitSize,
    *,
    cluster: Cluster,
    training: Training,
    layout: Layout,
    forward: float,
    backward: float,
    is_root: bool,
) -> UnitSeconds:
    """Compute and collectives of one FSDP unit in a micro-batch that reduces everything."""
    gathered = size.padded_elements * DTYPE_BYTES[training.gathered_dtype]
    reduced = size.padded_elements * DTYPE_BYTES[training.reduce_dtype]
    shard, regather, replicate = (
        shard_group(layout),
        regather_group(layout),
        replicate_group(layout),
    )
    copy_out, copy_in = copy_seconds(size, training=training, device=cluster.device)
    regathers = not is_root and layout.reshard_after_forward != "never"
    return UnitSeconds(
        forward=forward,
        backward=backward + flat_gradient_seconds(size, training=training, device=cluster.device),
        gather=group_seconds(cluster, shard, "all_gather", gathered),
        regather=group_seconds(cluster, regather, "all_gather", gathered) if regathers else 0.0,
        reduce_scatter=group_seconds(cluster, shard, "reduce_scatter", reduced),
        all_reduce=group_seconds(cluster, replicate, "all_reduce", reduced // layout.shard_ranks),
        copy_out=copy_out,
        copy_in=copy_in,
    )


def fsdp_micro_batch(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout, stage: Stage
) -> MicroBatch:
    """One micro-batch that reduces everything, for the stream simulation.

    A last unit of fewer blocks is priced as a full one's share: units are taken as equal.
    """
    device = cluster.device
    block = layout_block_seconds(model=model, device=device, training=training, layout=layout)
    tp_forward, tp_backward = tp_block_seconds(
        model=model, cluster=cluster, training=training, layout=layout
    )
    units = len(unit_blocks(blocks=stage.blocks, wrap_blocks=layout.wrap_blocks))
    blocks_a_unit = stage.blocks / units
    size = block_size(model=model, tp=layout.tp, shard_ranks=layout.shard_ranks)
    unit_size = UnitSize(
        elements=round(size.elements * blocks_a_unit),
        padded_elements=round(size.padded_elements * blocks_a_unit),
        tensors=size.tensors,
    )
    root = root_size(
        model=model,
        tp=layout.tp,
        shard_ranks=layout.shard_ranks,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    )
    head_forward, head_backward = (
        layout_head_seconds(model=model, device=device, training=training, layout=layout)
        if stage.has_head
        else (0.0, 0.0)
    )
    common = {"cluster": cluster, "training": training, "layout": layout}
    return MicroBatch(
        units=units,
        unit=fsdp_unit_seconds(
            unit_size,
            forward=blocks_a_unit * (block.forward + tp_forward),
            backward=blocks_a_unit * (block.recompute + block.backward + tp_backward),
            is_root=False,
            **common,  # type: ignore[arg-type]
        ),
        root=fsdp_unit_seconds(
            root,
            forward=head_forward,
            backward=head_backward,
            is_root=True,
            **common,  # type: ignore[arg-type]
        ),
        links_shared=_links_shared(cluster, layout),
    )


def _links_shared(cluster: Cluster, layout: Layout) -> bool:
    """Whether HSDP's all-reduces cross the same outermost links as the shard group."""
    if layout.dp_replicate == 1:
        return False
    return group_level(cluster, shard_group(layout)) == group_level(
        cluster, replicate_group(layout)
    )


def ddp_bucket_seconds(
    *, model: Model, cluster: Cluster, training: Training, layout: Layout, stage: Stage
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(seconds, fp32 bytes) of each of DDP's all-reduces of one synchronised backward."""
    sizes = ddp_buckets_bytes(
        model=model, stage=stage, tp=layout.tp, bucket_bytes=layout.ddp_bucket_bytes
    )
    group = replicate_group(layout)
    reduce_bytes = DTYPE_BYTES[training.reduce_dtype]
    seconds = tuple(
        group_seconds(cluster, group, "all_reduce", size * reduce_bytes // 4) for size in sizes
    )
    return seconds, sizes


def layout_optimizer_seconds(
    *, model: Model, device: Device, layout: Layout, local_parameters: int
) -> float:
    """Gradient norm, clipping and AdamW on one rank."""
    return optimizer_seconds(
        local_parameters=local_parameters,
        device=device,
        tensors=len(block_tensors(model)) * model.layers // layout.pp,
    )
