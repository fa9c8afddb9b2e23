"""Traffic of FSDP: gathers, reductions and the gradient norm of one rank's step."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.model.fsdp_units import NOTHING, block_units, end_units
from fsdpplan.cost.model.params import block_tensors
from fsdpplan.cost.model.shards import Stage, UnitSize, block_kinds, gradient_syncs, stage_root_size
from fsdpplan.cost.network.placement import (
    Group,
    expert_shard_group,
    pp_group,
    regather_group,
    replicate_group,
    shard_group,
    tp_group,
)
from fsdpplan.cost.schedule.order import round_microbatches
from fsdpplan.cost.traffic.calls import Calls
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES, Training

FP32_BYTES = 4


def root_gathered_dtype(training: Training) -> str:
    """Embedding, norms and head are never gathered in fp8."""
    return "fp32" if training.traits.gathers_fp32 else training.activation_dtype


def fsdp_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """All-gathers, reduce-scatters and (HSDP) all-reduces of `fully_shard`.

    Each micro-batch gathers every unit in forward and, unless resharding is off, every unit of
    blocks again in backward. Under pipelining with reshard never, a step gathers once, or as
    often as torch drops a stage of many. With expert parallelism the routed experts are units of
    their own.
    """
    training, layout = case.training, case.layout
    shard, experts = shard_group(layout), expert_shard_group(layout)
    dtype = training.gathered_dtype
    for piece in stage.pieces:
        gathers = layout.num_microbatches
        if layout.pp > 1:
            gathers = 1 if case.training.traits.keeps_stages else piece.gathers
        for unit in block_units(case, piece):
            for size, group in ((unit.size, shard), (unit.experts, experts)):
                yield from _unit_calls(
                    size,
                    group,
                    dtype,
                    unit.number,
                    gathers,
                    training=training,
                    layout=layout,
                    regathers=True,
                )
        ends = end_units(case, piece)
        for size in (ends.tables, ends.head, ends.root):
            yield from _unit_calls(
                size,
                shard,
                root_gathered_dtype(training),
                1,
                gathers,
                training=training,
                layout=layout,
                regathers=False,
            )
    if training.fp8_all_gather:
        # one all-reduce a step of the largest elements of all matrices, which give their scales
        yield Calls(
            collective="all_reduce",
            group=shard,
            dtype="fp32",
            count=1,
            call_bytes=FP32_BYTES * stage.blocks * len(_matrices(case.model)),
        )


def _matrices(model: Model) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in block_tensors(model) if tensor.is_matrix)


def reduced_rounds(*, training: Training, layout: Layout) -> int:
    """How often a step of a pipeline reduces the gradients of a stage: once, or after each round of
    micro-batches that goes through it."""
    if not training.traits.reduces_rounds:
        return 1
    number = layout.num_microbatches
    return number // round_microbatches(
        schedule=layout.schedule, pp=layout.pp, num_microbatches=number
    )


def _unit_calls(
    size: UnitSize,
    group: Group,
    gathered_dtype: str,
    number: int,
    gathers: int,
    *,
    training: Training,
    layout: Layout,
    regathers: bool,
) -> Iterator[Calls]:
    """Calls of `number` equal units that are sharded over `group` and gathered `gathers` times."""
    if size == NOTHING:
        return
    syncs = (
        reduced_rounds(training=training, layout=layout)
        if layout.pp > 1
        else gradient_syncs(layout)
    )
    gathered_bytes = size.padded_elements * DTYPE_BYTES[gathered_dtype]
    reduced_bytes = size.padded_elements * DTYPE_BYTES[training.reduce_dtype]
    yield Calls(
        collective="all_gather",
        group=group,
        dtype=gathered_dtype,
        count=gathers * number,
        call_bytes=gathered_bytes,
    )
    yield Calls(
        collective="reduce_scatter",
        group=group,
        dtype=training.reduce_dtype,
        count=syncs * number,
        call_bytes=reduced_bytes,
    )
    if layout.dp_replicate > 1:
        yield Calls(
            collective="all_reduce",
            group=replicate_group(layout),
            dtype=training.reduce_dtype,
            count=(syncs if layout.gradient_sync == "every" else 1) * number,
            call_bytes=reduced_bytes // group.ranks,
        )
    if regathers and layout.reshard_after_forward != "never":
        yield Calls(
            collective="all_gather",
            group=regather_group(layout) if group == shard_group(layout) else group,
            dtype=gathered_dtype,
            count=gathers * number,
            call_bytes=gathered_bytes,
        )


def norm_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """The gradient norm: one fp32 number a parameter, all-reduced over the shards, then over the
    tensor-parallel ranks; their sum over the pipeline's.

    The trainer adds up squares axis by axis; replicas have equal gradients by then.
    """
    model, layout = case.model, case.layout
    root = stage_root_size(model=model, stage=stage, tp=1, shard_ranks=1)
    tensors = root.tensors + sum(
        number * len(block_tensors(kind)) for kind, number in block_kinds(model=model, stage=stage)
    )
    sums = ((shard_group(layout), tensors), (tp_group(layout), tensors), (pp_group(layout), 1))
    for group, numbers in sums:
        yield Calls(
            collective="all_reduce",
            group=group,
            dtype="fp32",
            count=1,
            call_bytes=FP32_BYTES * numbers,
        )
