"""FSDP units: what one `fully_shard` call gathers, shards and reduces, padding included.

A unit is a run of `wrap_blocks` blocks, or the root with embedding, final norm and head. FSDP2
shards every parameter on dim 0 and pads it to a multiple of the shard group, parameter by
parameter, so a unit's gathered buffer is larger than its parameters.

Source: torch 2.13 `fully_shard` (per-parameter sharding, chunks of ceil(dim0 / n) rows); checked
against its collectives under a fake process group (tests/ground_truth).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdpplan.cost.params import (
    ParameterTensor,
    block_tensors,
    embedding_tensors,
    head_tensors,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """Elements of one FSDP unit on one tensor-parallel rank."""

    elements: int
    """Parameters of the unit."""
    padded_elements: int
    """Elements of its gathered buffer."""
    tensors: int
    """Number of parameters."""

    def shard_elements(self, shard_ranks: int) -> int:
        """Elements that the fullest rank (rank 0) keeps."""
        return self.padded_elements // shard_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one pipeline rank holds of the model."""

    blocks: int
    """Transformer blocks, over all its virtual stages."""
    has_embedding: bool
    has_head: bool


def whole_model(model: Model) -> Stage:
    """The only stage of a model without pipelining."""
    return Stage(blocks=model.layers, has_embedding=True, has_head=True)


def unit_size(tensors: tuple[ParameterTensor, ...], *, tp: int, shard_ranks: int) -> UnitSize:
    """Size of a unit made of `tensors`."""
    whole = padded = 0
    for tensor in tensors:
        shape = tensor.local_shape(tp)
        row_elements = prod(shape[1:])
        rows = -(-shape[0] // shard_ranks) * shard_ranks
        whole += shape[0] * row_elements
        padded += rows * row_elements
    return UnitSize(elements=whole, padded_elements=padded, tensors=len(tensors))


@lru_cache(maxsize=4096)
def block_size(*, model: Model, tp: int, shard_ranks: int) -> UnitSize:
    """Size of one transformer block."""
    return unit_size(block_tensors(model), tp=tp, shard_ranks=shard_ranks)


@lru_cache(maxsize=4096)
def root_size(
    *, model: Model, tp: int, shard_ranks: int, has_embedding: bool, has_head: bool
) -> UnitSize:
    """Size of the root unit: what no block holds. A pipeline stage inside has none.

    A tied head on another stage than the embedding is a second copy of the table.
    """
    tensors: tuple[ParameterTensor, ...] = ()
    if has_embedding:
        tensors += embedding_tensors(model)
    if has_head:
        tensors += head_tensors(model)
        if model.tied_embeddings and not has_embedding:
            tensors += embedding_tensors(model)[:1]
    return unit_size(tensors, tp=tp, shard_ranks=shard_ranks)


@lru_cache(maxsize=4096)
def stage_elements(*, model: Model, stage: Stage, tp: int) -> int:
    """Parameters that one tensor-parallel rank of a stage holds before sharding."""
    block = block_size(model=model, tp=tp, shard_ranks=1)
    root = root_size(
        model=model,
        tp=tp,
        shard_ranks=1,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    )
    return stage.blocks * block.elements + root.elements


@lru_cache(maxsize=4096)
def unit_blocks(*, blocks: int, wrap_blocks: int) -> tuple[int, ...]:
    """Blocks of each FSDP unit, in forward order; the last one may be smaller."""
    full, rest = divmod(blocks, wrap_blocks)
    return (wrap_blocks,) * full + ((rest,) if rest else ())


def gradient_syncs(layout: Layout) -> int:
    """Backward passes a step in which gradients are reduced."""
    return 1 if layout.gradient_sync == "last" else layout.num_microbatches
