"""Rank shards: what one rank of a shard group holds, which for the last ones may be less.

FSDP2 gives each rank ceil(rows / ranks) rows of a parameter, as long as there are any: of 20
experts over 6 ranks five have four, and the last has none. Plans are priced for the fullest rank.

Source: torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_chunk_with_empty`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from fsdpplan.cost.model.params import ParameterTensor, block_tensors
from fsdpplan.cost.model.shards import Stage, block_kinds, root_tensors, shard_dim
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import Layout


def rank_shard_elements(case: Case, stage: Stage, *, rank: int) -> int:
    """Parameters that `rank` holds of its pipeline stage under FSDP."""
    model, layout = case.model, case.layout
    index = rank // layout.tp % layout.shard_ranks
    held = 0
    for kind, blocks in block_kinds(model=model, stage=stage):
        tensors = block_tensors(kind)
        apart = [t for t in tensors if t.is_expert and layout.ep > 1]
        whole = [t for t in tensors if t not in apart]
        held += blocks * _elements(whole, layout, ranks=layout.shard_ranks, index=index)
        ranks = layout.shard_ranks // layout.ep
        held += blocks * _elements(apart, layout, ranks=ranks, index=index // layout.ep)
    for piece in stage.pieces:
        root = root_tensors(model=model, has_embedding=piece.has_embedding, has_head=piece.has_head)
        held += _elements(root, layout, ranks=layout.shard_ranks, index=index)
    return held


def _elements(tensors: Iterable[ParameterTensor], layout: Layout, *, ranks: int, index: int) -> int:
    held = 0
    for tensor in tensors:
        shape = tensor.local_shape(layout.tp, layout.ep if tensor.is_expert else 1)
        rows = shape[shard_dim(tensor, shape, ranks)]
        each = -(-rows // ranks)
        held += prod(shape) // rows * min(each, max(0, rows - index * each))
    return held
