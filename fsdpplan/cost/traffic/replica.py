"""Traffic of DDP, ZeRO-1 and ZeRO-2: gradients reduced in buckets, updated parameters gathered.

DDP all-reduces each bucket over its replicas. ZeRO-1 and ZeRO-2 reduce-scatter it over the shard
group and all-reduce the shard over the replicas, or all-reduce the whole over both; after the
optimizer they gather the parameters that each rank updated, once a step.

Source: ZeRO (arXiv 1910.02054), section 5; Megatron-LM docs/source/api-guide/dist_optimizer.md; the
rules of a training software are its traits (`fsdpplan.spec.runtime`).

Parameters in the order in which backward finishes them fill a bucket until it reaches its limit.
Source: torch 2.13 `compute_bucket_assignment_by_size` and the reducer's rebuild after the first
step; Megatron-LM megatron/core/distributed/param_and_grad_buffer.py.
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
    trained_tensors,
    trains_ends,
)
from fsdpplan.cost.model.shards import (
    Stage,
    block_kinds,
    gradient_syncs,
    stage_elements,
)
from fsdpplan.cost.network.placement import (
    Group,
    data_parallel_group,
    expert_shard_group,
    replicate_group,
    shard_group,
)
from fsdpplan.cost.step.replica import BucketSeconds
from fsdpplan.cost.traffic.calls import Calls, call_seconds
from fsdpplan.spec.layout import DDP_BUCKET_BYTES
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Collective
from fsdpplan.spec.training import DTYPE_BYTES, Training
from fsdpplan.spec.values import replace

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
    return [each for each in (*head, *blocks, *embedding) if each.is_trained]


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


def _reduces(bucket: Bucket, case: Case) -> tuple[Calls, ...]:
    """What reduces the gradients of one bucket."""
    training, layout = case.training, case.layout

    def call(collective: Collective, group: Group, size: int) -> Calls:
        return Calls(
            collective=collective,
            group=group,
            dtype=training.reduce_dtype,
            count=1,
            call_bytes=size,
        )

    sent = bucket.low_rank
    if sent is not None:  # what is sent as it is, then P, then Q
        group = data_parallel_group(layout)
        parts = (sent.whole, sent.p, sent.q)
        return tuple(call("all_reduce", group, FP32_BYTES * part) for part in parts)
    size = bucket.fp32_bytes * DTYPE_BYTES[training.reduce_dtype] // FP32_BYTES
    shard = expert_shard_group(layout) if bucket.is_expert else shard_group(layout)
    if layout.sharding == "ddp" or not training.traits.reduce_scatters_gradients:
        whole = data_parallel_group(layout)
        if bucket.is_expert:
            whole = Group(
                axis=f"{whole.axis}/ep", ranks=whole.ranks // layout.ep, stride=shard.stride
            )
        return (call("all_reduce", whole, size),)
    return (
        call("reduce_scatter", shard, size),
        call("all_reduce", replicate_group(layout), size // shard.ranks),
    )


def parameter_dtype(training: Training) -> str:
    """Number format of the parameters that a rank keeps whole."""
    if not (training.traits.half_parameters or training.half_states):
        return "fp32"
    return "fp8" if training.fp8_all_gather else training.activation_dtype


def _gathers(bucket: Bucket, case: Case, *, tensors: int, whole_bytes: int) -> tuple[Calls, float]:
    """(one of equal calls, how many) that bring the updated parameters of one bucket to the other
    ranks: not a whole number where buckets share the broadcasts of their owners.

    Gathered bucket by bucket; or broadcast by the ranks that own whole tensors (`tensors` in all,
    of `whole_bytes` in fp32, so no more ranks than that), of which the bucket has its share.
    """
    training, layout = case.training, case.layout
    group = expert_shard_group(layout) if bucket.is_expert else shard_group(layout)
    dtype = parameter_dtype(training)
    size = bucket.fp32_bytes * DTYPE_BYTES[dtype] // FP32_BYTES
    one = Calls(collective="all_gather", group=group, dtype=dtype, count=1, call_bytes=size)
    if not training.traits.broadcasts_parameters:
        return one, 1.0
    owners = min(group.ranks, tensors)
    each = whole_bytes * DTYPE_BYTES[dtype] // FP32_BYTES // owners
    one = replace(one, collective="broadcast", call_bytes=each)
    return one, owners * bucket.fp32_bytes / whole_bytes


class BucketCalls(NamedTuple):
    """What moves the gradients and the updated parameters of a bucket."""

    share: float
    """Of the bytes of all buckets."""
    reduces: tuple[Calls, ...]
    gathers: tuple[tuple[Calls, float], ...]
    """(one of equal calls, how many); none under DDP."""


@lru_cache(maxsize=2048)
def replica_buckets(case: Case, stage: Stage) -> tuple[BucketCalls, ...]:
    """Each bucket of a rank, in the order in which backward fills them; none on one rank and under
    FSDP."""
    layout = case.layout
    if layout.sharding == "fsdp" or layout.dp_replicate * layout.shard_ranks == 1:
        return ()
    filled = buckets(case, stage)
    whole = sum(bucket.fp32_bytes for bucket in filled)
    tensors = stage_tensors(model=case.model, stage=stage)

    def moved(bucket: Bucket) -> BucketCalls:
        gathers = (
            (_gathers(bucket, case, tensors=tensors, whole_bytes=whole),)
            if layout.sharding != "ddp"
            else ()
        )
        return BucketCalls(bucket.fp32_bytes / whole, _reduces(bucket, case), gathers)

    each = {bucket: moved(bucket) for bucket in dict.fromkeys(filled)}
    return tuple(each[bucket] for bucket in filled)


@lru_cache(maxsize=2048)
def bucket_seconds(case: Case, stage: Stage) -> tuple[BucketSeconds, ...]:
    """What they take."""

    def taken(bucket: BucketCalls) -> BucketSeconds:
        seconds = {"reduce_scatter": 0.0, "all_reduce": 0.0}
        for call in bucket.reduces:
            seconds[call.collective] += call_seconds(call, case.cluster)
        gather = sum(number * call_seconds(one, case.cluster) for one, number in bucket.gathers)
        return BucketSeconds(share=bucket.share, gather=gather, **seconds)

    filled = replica_buckets(case, stage)
    each = {bucket: taken(bucket) for bucket in dict.fromkeys(filled)}
    return tuple(each[bucket] for bucket in filled)


def replica_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Reductions of each synchronised backward and, under ZeRO, one gather of the parameters.

    Buckets are filled by bytes of gradients, which a communication hook casts where they are
    reduced in another dtype.
    """
    for bucket, number in Counter(replica_buckets(case, stage)).items():
        for call in bucket.reduces:
            yield replace(call, count=number * gradient_syncs(case.layout))
    yield from parameter_calls(case, stage)


def parameter_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """ZeRO's collectives of updated parameters, those of one shape together."""
    counts: dict[Calls, float] = {}
    for bucket in replica_buckets(case, stage):
        for one, number in bucket.gathers:
            counts[one] = counts.get(one, 0.0) + number
    for one, number in counts.items():
        yield replace(one, count=round(number))


@lru_cache(maxsize=1024)
def stage_tensors(*, model: Model, stage: Stage) -> int:
    """Parameters of a stage that are trained, counted as tensors."""
    tensors = sum(
        number * trained_tensors(kind) for kind, number in block_kinds(model=model, stage=stage)
    )
    if not trains_ends(model):
        return tensors
    tensors += len(embedding_tensors(model)) if stage.has_embedding else 0
    return tensors + (len(head_tensors(model)) if stage.has_head else 0)
