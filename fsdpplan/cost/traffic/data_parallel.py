"""Traffic of data parallelism: what FSDP, DDP, ZeRO-1 and ZeRO-2 move of one rank in a step.

Traffic of FSDP: gathers, reductions and the gradient norm of one rank's step.

Traffic of DDP, ZeRO-1 and ZeRO-2: gradients reduced in buckets, updated parameters gathered.

DDP all-reduces each bucket over its replicas. ZeRO-1 and ZeRO-2 reduce-scatter it over the shard
group and all-reduce the shard over the replicas, or all-reduce the whole over both; after the
optimizer they gather the parameters that each rank updated, once a step.

Source: ZeRO (arXiv 1910.02054), section 5; Megatron-LM docs/source/api-guide/dist_optimizer.md; the
rules of a training software are its traits (`fsdpplan.spec.runtime`).

Buckets: in which pieces DDP and ZeRO reduce gradients, and gather parameters.

Source: torch 2.13 `compute_bucket_assignment_by_size` and the reducer's rebuild after the first
step: parameters in the order in which backward finishes them fill a bucket until it reaches its
limit; the first bucket's limit is 1 MiB. Megatron-LM's
megatron/core/distributed/param_and_grad_buffer.py fills its buckets in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple

from fsdpplan.cost.model.formats import FP32_BYTES, LowRank, formats, low_rank
from fsdpplan.cost.model.params import (
    ParameterTensor,
    block_tensors,
    embedding_tensors,
    head_tensors,
)
from fsdpplan.cost.model.shards import (
    NOTHING,
    BlockUnit,
    Stage,
    UnitSize,
    block_kinds,
    block_units,
    end_units,
    gradient_syncs,
    stage_elements,
    stage_root_size,
)
from fsdpplan.cost.network.placement import (
    Group,
    data_parallel_group,
    expert_shard_group,
    pp_group,
    regather_group,
    replicate_group,
    shard_group,
    tp_group,
)
from fsdpplan.cost.schedule.order import layout_order
from fsdpplan.cost.traffic.calls import Calls
from fsdpplan.spec.layout import DDP_BUCKET_BYTES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Collective
from fsdpplan.spec.training import DTYPE_BYTES, Training
from fsdpplan.spec.values import replace


def root_gathered_dtype(training: Training) -> str:
    """Embedding, norms and head are never gathered in fp8."""
    return "fp32" if training.traits.gathers_fp32 else training.activation_dtype


class UnitCalls(NamedTuple):
    """The collectives of an FSDP unit, each once, under the names of the operations that move it in
    its program."""

    gather: tuple[Calls, ...] = ()
    reduce_scatter: tuple[Calls, ...] = ()
    all_reduce: tuple[Calls, ...] = ()
    """None without copies of the shards."""
    regather: tuple[Calls, ...] = ()
    """None where forward's copy is kept."""


def size_calls(
    case: Case, size: UnitSize, group: Group, dtype: str, *, regathers: bool, number: int = 1
) -> UnitCalls:
    """Of parameters that are sharded over `group` and gathered in `dtype`, `number` times one after
    another; `regathers`: in backward again, unless resharding is off."""
    training, layout = case.training, case.layout
    if size == NOTHING or not number:
        return UnitCalls()
    gathered = size.padded_elements * DTYPE_BYTES[dtype]
    reduced = size.padded_elements * DTYPE_BYTES[training.reduce_dtype]
    again = regather_group(layout) if group == shard_group(layout) else group

    def calls(collective: Collective, over: Group, of: str, size_bytes: int) -> tuple[Calls, ...]:
        one = Calls(
            collective=collective, group=over, dtype=of, count=number, call_bytes=size_bytes
        )
        return (one,)

    copies = replicate_group(layout)
    is_again = regathers and layout.reshard_after_forward != "never"
    return UnitCalls(
        gather=calls("all_gather", group, dtype, gathered),
        reduce_scatter=calls("reduce_scatter", group, training.reduce_dtype, reduced),
        all_reduce=calls("all_reduce", copies, training.reduce_dtype, reduced // group.ranks)
        if layout.dp_replicate > 1
        else (),
        regather=calls("all_gather", again, dtype, gathered) if is_again else (),
    )


def block_unit_calls(case: Case, unit: BlockUnit) -> tuple[UnitCalls, ...]:
    """Of a unit of blocks, and of the routed experts of its blocks, which expert parallelism makes
    units of their own."""
    layout, dtype, number = case.layout, case.training.gathered_dtype, unit.expert_blocks
    experts = expert_shard_group(layout)
    return (
        size_calls(case, unit.size, shard_group(layout), dtype, regathers=True),
        size_calls(case, unit.experts, experts, dtype, regathers=True, number=number),
    )


def end_unit_calls(case: Case, size: UnitSize) -> UnitCalls:
    """Of a unit of what no block holds, which is not gathered again."""
    dtype = root_gathered_dtype(case.training)
    return size_calls(case, size, shard_group(case.layout), dtype, regathers=False)


def fsdp_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """All-gathers, reduce-scatters and (HSDP) all-reduces of `fully_shard`.

    Each micro-batch gathers every unit in forward and, unless resharding is off, every unit of
    blocks again in backward. Under pipelining with reshard never, a step gathers once, or as
    often as torch drops a stage of many; blocks that are resharded also once for each forward
    pass, in the pass behind it.
    """
    training, layout = case.training, case.layout
    syncs = gradient_syncs(layout)
    if layout.pp > 1:
        syncs = reduced_rounds(training=training, layout=layout)
    whole = syncs if layout.gradient_sync == "every" else 1
    for piece in stage.pieces:
        gathers = of_blocks = layout.num_microbatches
        again = layout.num_microbatches if layout.pp == 1 else 0
        if layout.pp > 1:
            gathers = 1 if training.traits.keeps_stages else piece.gathers
            of_blocks = gathers + (layout.num_microbatches if layout.reshards_stages else 0)
        blocks, ends = block_units(case, piece), end_units(case, piece)
        units = [
            (calls, unit.number, of_blocks)
            for unit in blocks
            for calls in block_unit_calls(case, unit)
        ]
        for size in (ends.tables, ends.head, ends.root):
            units.append((end_unit_calls(case, size), 1, gathers))
        for unit, number, gathered in units:
            for calls, times in zip(unit, (gathered, syncs, whole, again), strict=True):
                for call in calls if times else ():
                    yield replace(call, count=call.count * number * times)
    yield from scale_calls(case, stage)


def scale_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """One all-reduce a step of the largest elements of all matrices, which give their scales where
    they are gathered in fp8."""
    if case.training.fp8_all_gather:
        yield Calls(
            collective="all_reduce",
            group=shard_group(case.layout),
            dtype="fp32",
            count=1,
            call_bytes=FP32_BYTES * _matrices(case.model, stage),
        )


def _matrices(model: Model, stage: Stage) -> int:
    """Matrices of all blocks of a stage; a mixture's few dense ones count as the others."""
    if not model.is_patterned:
        return stage.blocks * sum(tensor.is_matrix for tensor in block_tensors(model))
    kinds = block_kinds(model=model, stage=stage)
    return sum(n * tensor.is_matrix for kind, n in kinds for tensor in block_tensors(kind))


def reduced_rounds(*, training: Training, layout: Layout) -> int:
    """How often a step of a pipeline reduces the gradients of a stage: once, or after each round of
    micro-batches that goes through it."""
    if not training.traits.reduces_rounds:
        return 1
    return layout.num_microbatches // layout_order(layout).round_size


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


FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket, so that reducing begins early."""


def layout_bucket_bytes(case: Case, stage: Stage) -> int:
    """fp32 bytes of gradients that are reduced together.

    What the layout says, where it says other than DDP's default; else what the training software
    does: buckets that grow with the data-parallel ranks, or all of a rank in one.
    """
    layout = case.layout
    wider = _fp32_of_gradients(case)
    if layout.sharding == "ddp" and layout.ddp_bucket_bytes != DDP_BUCKET_BYTES:
        return wider * layout.ddp_bucket_bytes
    traits = case.training.traits
    if traits.bucket_bytes is None:
        return 4 * stage_elements(model=case.model, stage=stage, tp=layout.tp, ep=layout.ep)
    ranks = layout.dp_replicate * layout.shard_ranks
    return wider * max(traits.bucket_bytes, ranks * traits.bucket_bytes_a_rank)


def _fp32_of_gradients(case: Case) -> int:
    """fp32 bytes for each byte of a gradient: a bucket is full by the bytes that it has."""
    return FP32_BYTES // formats(training=case.training, layout=case.layout).kept_gradient


@lru_cache(maxsize=1024)
def ddp_buckets_bytes(
    *,
    model: Model,
    stage: Stage,
    tp: int,
    bucket_bytes: int,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    ep: int = 1,
) -> tuple[int, ...]:
    """fp32 bytes of each bucket, in the order of their reductions.

    With ep above 1 without the routed experts, which are reduced over fewer ranks.
    """
    tensors = (t for t in _backward_order(model, stage) if ep == 1 or not t.is_expert)
    return _filled(tensors, tp=tp, ep=ep, first=first_bucket_bytes, limit=bucket_bytes)


@lru_cache(maxsize=1024)
def expert_buckets_bytes(
    *, model: Model, stage: Stage, tp: int, ep: int, bucket_bytes: int
) -> tuple[int, ...]:
    """The same of the routed experts of one expert-parallel rank; none where ep is 1."""
    if ep == 1:
        return ()
    tensors = (t for t in _backward_order(model, stage) if t.is_expert)
    return _filled(tensors, tp=tp, ep=ep, first=bucket_bytes, limit=bucket_bytes)


def _filled(
    tensors: Iterator[ParameterTensor], *, tp: int, ep: int, first: int, limit: int
) -> tuple[int, ...]:
    sizes: list[int] = []
    current, most = 0, first
    for tensor in tensors:
        current += 4 * prod(tensor.local_shape(tp, ep))
        if current >= min(most, limit):
            sizes.append(current)
            current, most = 0, limit
    return (*sizes, current) if current else tuple(sizes)


def _backward_order(model: Model, stage: Stage) -> list[ParameterTensor]:
    """Head, blocks from the last, embedding; within each, the reverse of registration."""
    head = list(reversed(head_tensors(model))) if stage.has_head else []
    is_apart = any(piece.has_head and not piece.has_embedding for piece in stage.pieces)
    if is_apart and model.tied_embeddings:
        head.insert(0, embedding_tensors(model)[0])  # a second copy of the table
    kinds = reversed(block_kinds(model=model, stage=stage))
    blocks = chain.from_iterable(
        reversed(block_tensors(kind)) for kind, number in kinds for _ in range(number)
    )
    embedding = reversed(embedding_tensors(model)) if stage.has_embedding else ()
    return [*head, *blocks, *embedding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together, or parameters that are gathered together."""

    fp32_bytes: int
    """Of its parameters."""
    low_rank: LowRank | None = None
    """What is sent in their place; None: they are sent as they are."""
    is_expert: bool
    """Routed experts of one expert-parallel rank, of which fewer ranks have copies."""


def buckets(case: Case, stage: Stage) -> tuple[Bucket, ...]:
    """The buckets of a rank in the order in which backward fills them; forward needs them the
    other way round. DDP's first is small, unless the layout says a size
    (torch 2.13 nn/parallel/distributed.py, `_BucketCapacityConfig`)."""
    layout = case.layout
    limit = layout_bucket_bytes(case, stage)
    is_usual = layout.sharding == "ddp" and layout.ddp_bucket_bytes == DDP_BUCKET_BYTES
    first = _fp32_of_gradients(case) * FIRST_BUCKET_BYTES if is_usual else limit
    dense = ddp_buckets_bytes(
        model=case.model,
        stage=stage,
        tp=layout.tp,
        ep=layout.ep,
        bucket_bytes=limit,
        first_bucket_bytes=first,
    )
    experts = expert_buckets_bytes(
        model=case.model, stage=stage, tp=layout.tp, ep=layout.ep, bucket_bytes=limit
    )
    sent = _sent_as(case, stage, limit=limit, first=first)
    filled = [
        *_by_progress(dense, is_expert=False, sent=sent),
        *_by_progress(experts, is_expert=True),
    ]
    return tuple(bucket for _, bucket in sorted(filled, key=lambda pair: pair[0]))


def _by_progress(
    sizes: tuple[int, ...], *, is_expert: bool, sent: tuple[LowRank, ...] = ()
) -> Iterator[tuple[float, Bucket]]:
    """(share of backward after which it is full, bucket)."""
    done, total = 0, sum(sizes)
    for index, size in enumerate(sizes):
        done += size
        low_rank = sent[index] if sent else None
        yield done / total, Bucket(fp32_bytes=size, is_expert=is_expert, low_rank=low_rank)


def _sent_as(case: Case, stage: Stage, *, limit: int, first: int) -> tuple[LowRank, ...]:
    """What PowerSGD sends of each bucket; nothing without it."""
    layout, rank = case.layout, case.training.powersgd_rank
    if not rank:
        return ()
    shapes = [tensor.local_shape(layout.tp) for tensor in _backward_order(case.model, stage)]
    return tuple(low_rank(part, rank) for part in _parted(shapes, first=first, limit=limit))


def _parted(
    shapes: list[tuple[int, ...]], *, first: int, limit: int
) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the tensors of each bucket, as `_filled` counts their bytes."""
    part: list[tuple[int, ...]] = []
    size, most = 0, first
    for shape in shapes:
        part.append(shape)
        size += FP32_BYTES * prod(shape)
        if size >= min(most, limit):
            yield part
            part, size, most = [], 0, limit
    if part:
        yield part


def is_reduced(layout: Layout) -> bool:
    """There are ranks with other tokens, and parameters that they all have."""
    return layout.sharding != "fsdp" and layout.dp_replicate * layout.shard_ranks > 1


def reductions(
    bucket: Bucket, *, training: Training, layout: Layout
) -> tuple[tuple[Collective, Group, int], ...]:
    """(collective, group, bytes) that reduce the gradients of one bucket."""
    sent = bucket.low_rank
    if sent is not None:  # what is sent as it is, then P, then Q
        group = data_parallel_group(layout)
        parts = (sent.whole, sent.p, sent.q)
        return tuple(("all_reduce", group, FP32_BYTES * part) for part in parts)
    size = bucket.fp32_bytes * DTYPE_BYTES[training.reduce_dtype] // FP32_BYTES
    shard = expert_shard_group(layout) if bucket.is_expert else shard_group(layout)
    if layout.sharding == "ddp" or not training.traits.reduce_scatters_gradients:
        whole = data_parallel_group(layout)
        if bucket.is_expert:
            whole = Group(
                axis=f"{whole.axis}/ep", ranks=whole.ranks // layout.ep, stride=shard.stride
            )
        return (("all_reduce", whole, size),)
    return (
        ("reduce_scatter", shard, size),
        ("all_reduce", replicate_group(layout), size // shard.ranks),
    )


def parameter_dtype(training: Training) -> str:
    """Number format of the parameters that a rank keeps whole."""
    if not (training.traits.half_parameters or training.half_states):
        return "fp32"
    return "fp8" if training.fp8_all_gather else training.activation_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMoves:
    """Equal collectives that bring updated parameters to all ranks."""

    collective: Collective
    group: Group
    count: float
    """Not whole where buckets share the broadcasts of their owners."""
    call_bytes: int


def parameter_moves(
    bucket: Bucket, *, training: Training, layout: Layout, tensors: int, whole_bytes: int
) -> ParameterMoves:
    """How the updated parameters of one bucket reach the other ranks.

    Gathered bucket by bucket; or broadcast by the ranks that own whole tensors (`tensors` in all,
    of `whole_bytes` in fp32, so no more ranks than that), of which the bucket has its share.
    """
    group = expert_shard_group(layout) if bucket.is_expert else shard_group(layout)
    dtype_bytes = DTYPE_BYTES[parameter_dtype(training)]
    size = bucket.fp32_bytes * dtype_bytes // FP32_BYTES
    if not training.traits.broadcasts_parameters:
        return ParameterMoves(collective="all_gather", group=group, count=1, call_bytes=size)
    owners = min(group.ranks, tensors)
    return ParameterMoves(
        collective="broadcast",
        group=group,
        count=owners * bucket.fp32_bytes / whole_bytes,
        call_bytes=whole_bytes * dtype_bytes // FP32_BYTES // owners,
    )


def replica_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Reductions of each synchronised backward and, under ZeRO, one gather of the parameters.

    Buckets are filled by bytes of gradients, which a communication hook casts where they are
    reduced in another dtype.
    """
    training, layout = case.training, case.layout
    if not is_reduced(layout):
        return
    filled = buckets(case, stage)
    for bucket, number in Counter(filled).items():
        for collective, group, size in reductions(bucket, training=training, layout=layout):
            yield Calls(
                collective=collective,
                group=group,
                dtype=training.reduce_dtype,
                count=number * gradient_syncs(layout),
                call_bytes=size,
            )
    if layout.sharding != "ddp":
        yield from parameter_calls(case, stage, filled)


def parameter_calls(case: Case, stage: Stage, filled: tuple[Bucket, ...]) -> Iterator[Calls]:
    """The collectives of updated parameters, those of one shape together."""
    training = case.training
    whole = sum(bucket.fp32_bytes for bucket in filled)
    tensors = stage_tensors(model=case.model, stage=stage)
    counts: dict[tuple[Collective, Group, int], float] = {}
    for bucket in filled:
        moves = parameter_moves(
            bucket, training=training, layout=case.layout, tensors=tensors, whole_bytes=whole
        )
        key = (moves.collective, moves.group, moves.call_bytes)
        counts[key] = counts.get(key, 0.0) + moves.count
    for (collective, group, size), count in counts.items():
        yield Calls(
            collective=collective,
            group=group,
            dtype=parameter_dtype(training),
            count=round(count),
            call_bytes=size,
        )


@lru_cache(maxsize=1024)
def stage_tensors(*, model: Model, stage: Stage) -> int:
    """Parameters of a stage, counted as tensors."""
    tensors = sum(
        number * len(block_tensors(kind)) for kind, number in block_kinds(model=model, stage=stage)
    )
    tensors += len(embedding_tensors(model)) if stage.has_embedding else 0
    return tensors + (len(head_tensors(model)) if stage.has_head else 0)
