"""DDP: the buckets in which DistributedDataParallel all-reduces gradients.

Source: torch 2.13 `compute_bucket_assignment_by_size` and the reducer's rebuild after the first
step: parameters in the order in which backward finishes them fill a bucket until it reaches its
limit; the first bucket's limit is 1 MiB.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

from fsdpplan.cost.params import (
    ParameterTensor,
    block_tensors,
    embedding_tensors,
    head_tensors,
)
from fsdpplan.cost.shards import Stage
from fsdpplan.spec.model import Model

FIRST_BUCKET_BYTES = 2**20


@lru_cache(maxsize=256)
def ddp_buckets_bytes(*, model: Model, stage: Stage, tp: int, bucket_bytes: int) -> tuple[int, ...]:
    """fp32 bytes of each bucket, in the order of their all-reduces."""
    sizes: list[int] = []
    current = 0
    limit = FIRST_BUCKET_BYTES
    for tensor in _backward_order(model, stage):
        elements = 1
        for extent in tensor.local_shape(tp):
            elements *= extent
        current += 4 * elements
        if current >= min(limit, bucket_bytes):
            sizes.append(current)
            current, limit = 0, bucket_bytes
    return (*sizes, current) if current else tuple(sizes)


def _backward_order(model: Model, stage: Stage) -> list[ParameterTensor]:
    """Head, blocks from the last, embedding; within each, the reverse of registration."""
    head = reversed(head_tensors(model)) if stage.has_head else ()
    blocks = chain.from_iterable(reversed(block_tensors(model)) for _ in range(stage.blocks))
    embedding = reversed(embedding_tensors(model)) if stage.has_embedding else ()
    return [*head, *blocks, *embedding]
