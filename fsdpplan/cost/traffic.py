"""Traffic: which collectives one rank calls in a step, how often, and with how many bytes.

`bytes` is always the full unsharded buffer: the output of an all-gather, the input of a
reduce-scatter, the buffer of an all-reduce. Counts and bytes of FSDP2 and HSDP equal those of real
`fully_shard` steps under a fake process group exactly, padding included (tests/ground_truth);
so do those of tensor with sequence parallelism. DDP's counts are those of real gloo jobs
(tests/trainer).

Left out: the few scalars a step of the loss and of agreement between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdpplan.cost.collectives import Collective
from fsdpplan.cost.ddp import ddp_buckets_bytes
from fsdpplan.cost.params import block_tensors, head_tensors
from fsdpplan.cost.shards import (
    Stage,
    UnitSize,
    block_size,
    gradient_syncs,
    root_size,
    unit_blocks,
)
from fsdpplan.cost.sizes import local_tokens
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES, Training

FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group by its shape: what placement on the network needs."""

    axis: str
    ranks: int
    stride: int
    """Ranks between neighbours of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Equal calls of one collective."""

    collective: Collective
    group: Group
    dtype: str
    count: int
    """Calls a step."""
    call_bytes: int
    """Full buffer of one call."""


def shard_group(layout: Layout) -> Group:
    """The ranks over which FSDP shards."""
    axis = "dp_shard" if layout.cp == 1 else "dp_shard*cp"
    return Group(axis=axis, ranks=layout.shard_ranks, stride=layout.tp)


def regather_group(layout: Layout) -> Group:
    """The ranks from which backward gathers: fewer under an integer reshard."""
    whole = shard_group(layout)
    if isinstance(layout.reshard_after_forward, int):
        return Group(axis=whole.axis, ranks=layout.reshard_after_forward, stride=whole.stride)
    return whole


def replicate_group(layout: Layout) -> Group:
    """The ranks that hold copies of one shard."""
    return Group(
        axis="dp_replicate",
        ranks=layout.dp_replicate,
        stride=layout.shard_ranks * layout.tp,
    )


def tp_group(layout: Layout) -> Group:
    """The tensor-parallel ranks."""
    return Group(axis="tp", ranks=layout.tp, stride=1)


def pp_group(layout: Layout) -> Group:
    """The pipeline's ranks."""
    return Group(axis="pp", ranks=layout.pp, stride=layout.world // layout.pp)


def block_units(
    *, model: Model, layout: Layout, stage: Stage, shard_ranks: int
) -> list[tuple[UnitSize, int]]:
    """(size, how many) of the block units; the last unit may hold fewer blocks."""
    block = block_size(model=model, tp=layout.tp, shard_ranks=shard_ranks)
    counts: dict[int, int] = {}
    for blocks in unit_blocks(blocks=stage.blocks, wrap_blocks=layout.wrap_blocks):
        counts[blocks] = counts.get(blocks, 0) + 1
    return [
        (
            UnitSize(
                elements=blocks * block.elements,
                padded_elements=blocks * block.padded_elements,
                tensors=blocks * block.tensors,
            ),
            number,
        )
        for blocks, number in counts.items()
    ]


def fsdp_calls(
    *, model: Model, training: Training, layout: Layout, stage: Stage
) -> Iterator[Calls]:
    """All-gathers, reduce-scatters and (HSDP) all-reduces of `fully_shard`.

    Each micro-batch gathers every unit in forward and, unless resharding is off, every unit but
    the root again in backward. Under pipelining with reshard never, a step gathers once.
    """
    shard, regather, replicate = (
        shard_group(layout),
        regather_group(layout),
        replicate_group(layout),
    )
    gathers = 1 if layout.pp > 1 else layout.num_microbatches
    syncs = 1 if layout.pp > 1 else gradient_syncs(layout)
    all_reduces = syncs if layout.gradient_sync == "every" else 1
    gathered_dtype, reduce_dtype = training.gathered_dtype, training.reduce_dtype
    element_bytes, reduce_bytes = DTYPE_BYTES[gathered_dtype], DTYPE_BYTES[reduce_dtype]
    root = root_size(
        model=model,
        tp=layout.tp,
        shard_ranks=shard.ranks,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    )
    blocks = block_units(model=model, layout=layout, stage=stage, shard_ranks=shard.ranks)
    units = [*blocks, (root, 1)] if root.elements else blocks
    for unit, number in units:
        gathered_bytes = unit.padded_elements * element_bytes
        reduced_bytes = unit.padded_elements * reduce_bytes
        yield Calls(
            collective="all_gather",
            group=shard,
            dtype=gathered_dtype,
            count=gathers * number,
            call_bytes=gathered_bytes,
        )
        yield Calls(
            collective="reduce_scatter",
            group=shard,
            dtype=reduce_dtype,
            count=syncs * number,
            call_bytes=reduced_bytes,
        )
        if replicate.ranks > 1:
            yield Calls(
                collective="all_reduce",
                group=replicate,
                dtype=reduce_dtype,
                count=all_reduces * number,
                call_bytes=reduced_bytes // shard.ranks,
            )
    if layout.reshard_after_forward != "never":
        for unit, number in blocks:
            yield Calls(
                collective="all_gather",
                group=regather,
                dtype=gathered_dtype,
                count=gathers * number,
                call_bytes=unit.padded_elements * element_bytes,
            )


def norm_calls(*, model: Model, layout: Layout, stage: Stage) -> Iterator[Calls]:
    """The gradient norm: one fp32 number a parameter, all-reduced over the shards, then over the
    tensor-parallel ranks.

    `torch.nn.utils.clip_grad_norm_`, which the trainer clips with, stacks the norms of all
    parameters' shards and reduces them at once; replicas have equal gradients by then.
    """
    tensors = stage.blocks * len(block_tensors(model)) + (
        root_size(
            model=model,
            tp=1,
            shard_ranks=1,
            has_embedding=stage.has_embedding,
            has_head=stage.has_head,
        ).tensors
    )
    for group in (shard_group(layout), tp_group(layout)):
        yield Calls(
            collective="all_reduce",
            group=group,
            dtype="fp32",
            count=1,
            call_bytes=FP32_BYTES * tensors,
        )


def ddp_calls(*, model: Model, training: Training, layout: Layout, stage: Stage) -> Iterator[Calls]:
    """DDP's all-reduces: one a bucket and synchronised backward.

    Buckets are filled by fp32 bytes; a bf16 reduction compresses them by a communication hook.
    """
    if layout.dp_replicate == 1:
        return
    buckets = ddp_buckets_bytes(
        model=model, stage=stage, tp=layout.tp, bucket_bytes=layout.ddp_bucket_bytes
    )
    counts: dict[int, int] = {}
    for size in buckets:
        counts[size] = counts.get(size, 0) + 1
    for size, number in counts.items():
        yield Calls(
            collective="all_reduce",
            group=replicate_group(layout),
            dtype=training.reduce_dtype,
            count=number * gradient_syncs(layout),
            call_bytes=size * DTYPE_BYTES[training.reduce_dtype] // FP32_BYTES,
        )


def activation_bytes(*, model: Model, training: Training, layout: Layout) -> int:
    """The residual stream of one micro-batch, unsplit: what TP gathers and stages hand over."""
    tokens = local_tokens(training=training, layout=layout)
    return tokens * model.hidden * DTYPE_BYTES[training.precision]


def tp_block_calls(layout: Layout) -> tuple[int, int]:
    """(forward, backward) pairs of all-gather and reduce-scatter of one block.

    With sequence parallelism, attention and the feed-forward network each gather their input and
    scatter their output; backward mirrors it.
    """
    return 2, 2


def tp_calls(*, model: Model, training: Training, layout: Layout, stage: Stage) -> Iterator[Calls]:
    """Collectives of tensor parallelism with sequence parallelism.

    Those of `tp_block_calls` in each block; the embedding scatters and the head gathers once.
    Recomputation repeats forward's, but for the last reduce-scatter, before which it stops.
    """
    if layout.tp == 1:
        return
    group = tp_group(layout)
    size = activation_bytes(model=model, training=training, layout=layout)
    recomputes = layout.activation_checkpointing in ("op", "full")
    ends = int(stage.has_embedding) + int(stage.has_head)
    per_block = sum(tp_block_calls(layout))
    per_block_gathers = per_block + (2 if recomputes else 0)
    per_block_scatters = per_block + (1 if recomputes else 0)
    for collective, block_calls in (
        ("all_gather", per_block_gathers),
        ("reduce_scatter", per_block_scatters),
    ):
        yield Calls(
            collective=collective,  # type: ignore[arg-type]
            group=group,
            dtype=training.precision,
            count=layout.num_microbatches * (stage.blocks * block_calls + ends),
            call_bytes=size,
        )
    yield from _tp_norm_weight_calls(model=model, training=training, layout=layout, stage=stage)
    if stage.has_head:
        yield from _tp_loss_calls(model=model, training=training, layout=layout)


def _tp_norm_weight_calls(
    *, model: Model, training: Training, layout: Layout, stage: Stage
) -> Iterator[Calls]:
    """Sequence parallelism: each rank has its tokens' part of the norms' gradients."""
    holds = layout.gradient_sync == "last" and layout.num_microbatches > 1
    dtype = training.reduce_dtype if holds else training.precision
    widths: dict[int, int] = {}
    norms = [t for t in block_tensors(model) if "norm" in t.name]
    last_norm = [t for t in head_tensors(model) if len(t.shape) == 1]
    for tensors, copies in ((norms, stage.blocks), (last_norm, int(stage.has_head))):
        for tensor in tensors:
            widths[tensor.shape[0]] = widths.get(tensor.shape[0], 0) + copies
    for width, number in widths.items():
        yield Calls(
            collective="all_reduce",
            group=tp_group(layout),
            dtype=dtype,
            count=gradient_syncs(layout) * number,
            call_bytes=width * DTYPE_BYTES[dtype],
        )


def _tp_loss_calls(*, model: Model, training: Training, layout: Layout) -> Iterator[Calls]:
    """The logits, gathered; or, of a vocabulary-parallel loss, three fp32 numbers a token (the
    highest logit, the sum of exponentials, the target's logit)."""
    tokens = local_tokens(training=training, layout=layout)
    if layout.loss_parallel:
        yield Calls(
            collective="all_reduce",
            group=tp_group(layout),
            dtype="fp32",
            count=3 * layout.num_microbatches,
            call_bytes=FP32_BYTES * tokens,
        )
        return
    yield Calls(
        collective="all_gather",
        group=tp_group(layout),
        dtype=training.precision,
        count=layout.num_microbatches,
        call_bytes=tokens * model.vocab * DTYPE_BYTES[training.precision],
    )


def pp_calls(*, model: Model, training: Training, layout: Layout, stage: Stage) -> Iterator[Calls]:
    """Messages between pipeline stages: activations forward, their gradients back.

    A rank sends once a micro-batch and virtual stage in each direction, but the first and last
    stage of the whole pipeline only in one.
    """
    if layout.pp == 1:
        return
    size = activation_bytes(model=model, training=training, layout=layout)
    per_micro_batch = 2 * layout.virtual_stages
    per_micro_batch -= int(stage.has_embedding) + int(stage.has_head)
    yield Calls(
        collective="send_recv",
        group=pp_group(layout),
        dtype=training.precision,
        count=layout.num_microbatches * per_micro_batch,
        call_bytes=size // layout.tp if layout.sequence_parallel else size,
    )


def step_calls(*, model: Model, training: Training, layout: Layout, stage: Stage) -> list[Calls]:
    """Every collective of one rank's step."""
    calls: list[Calls] = []
    if layout.sharding == "fsdp":
        calls += fsdp_calls(model=model, training=training, layout=layout, stage=stage)
        calls += norm_calls(model=model, layout=layout, stage=stage)
    else:
        calls += ddp_calls(model=model, training=training, layout=layout, stage=stage)
    calls += tp_calls(model=model, training=training, layout=layout, stage=stage)
    calls += pp_calls(model=model, training=training, layout=layout, stage=stage)
    return [call for call in calls if call.count and call.group.ranks > 1]
