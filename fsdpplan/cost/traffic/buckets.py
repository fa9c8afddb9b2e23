"""Buckets: in which pieces DDP and ZeRO reduce gradients, and gather parameters.

Source: torch 2.13 `compute_bucket_assignment_by_size` and the reducer's rebuild after the first
step: parameters in the order in which backward finishes them fill a bucket until it reaches its
limit; the first bucket's limit is 1 MiB. Megatron-LM's
megatron/core/distributed/param_and_grad_buffer.py fills its buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from math import prod

from fsdpplan.cost.model.params import (
    ParameterTensor,
    block_tensors,
    embedding_tensors,
    head_tensors,
)
from fsdpplan.cost.model.shards import Stage, block_kinds, stage_elements
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import DDP_BUCKET_BYTES
from fsdpplan.spec.model import Model

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket, so that reducing begins early."""


def layout_bucket_bytes(case: Case, stage: Stage) -> int:
    """fp32 bytes of gradients that are reduced together.

    What the layout says, where it says other than DDP's default; else what the training software
    does: buckets that grow with the data-parallel ranks, or all of a rank in one.
    """
    layout = case.layout
    if layout.sharding == "ddp" and layout.ddp_bucket_bytes != DDP_BUCKET_BYTES:
        return layout.ddp_bucket_bytes
    traits = case.training.traits
    if traits.bucket_bytes is None:
        return 4 * stage_elements(model=case.model, stage=stage, tp=layout.tp, ep=layout.ep)
    ranks = layout.dp_replicate * layout.shard_ranks
    return max(traits.bucket_bytes, ranks * traits.bucket_bytes_a_rank)


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
