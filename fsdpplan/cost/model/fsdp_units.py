"""FSDP units of a stage: their sizes, and how many there are of each, in the order of forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.model.shards import (
    Stage,
    UnitSize,
    block_kinds,
    block_size,
    expert_size,
    root_tensors,
    unit_blocks,
    unit_size,
)
from fsdpplan.spec.case import Case
from fsdpplan.spec.model import Model

NOTHING = UnitSize(elements=0, padded_elements=0, tensors=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUnit:
    """Equal FSDP units of a few blocks of one kind."""

    model: Model
    """Whose blocks they are: without experts, `dense_view` of the model."""
    blocks: int
    """Blocks of one unit."""
    size: UnitSize
    """What is sharded over the whole shard group."""
    experts: UnitSize
    """Routed experts of one expert-parallel rank, sharded over fewer; nothing where ep is 1."""
    number: int
    """Units like this, one after another."""
    kept_blocks: int = 0
    """Those of one unit's blocks, the last, that keep all activations though the layout
    recomputes."""


def _times(size: UnitSize, number: int) -> UnitSize:
    return UnitSize(
        elements=number * size.elements,
        padded_elements=number * size.padded_elements,
        tensors=number * size.tensors,
    )


def block_units(case: Case, stage: Stage) -> tuple[BlockUnit, ...]:
    """The block units of a stage. A unit that would span blocks without and with experts is taken
    as two."""
    layout = case.layout
    return _block_units(
        case.model, stage, layout.tp, layout.ep, layout.shard_ranks, layout.wrap_blocks
    )


@lru_cache(maxsize=4096)
def _block_units(
    model: Model, stage: Stage, tp: int, ep: int, shard_ranks: int, wrap_blocks: int
) -> tuple[BlockUnit, ...]:
    units: list[BlockUnit] = []
    recomputed = stage.blocks - stage.kept_blocks
    for kind, blocks in block_kinds(model=model, stage=stage):
        size = block_size(model=kind, tp=tp, shard_ranks=shard_ranks, ep=ep)
        experts = expert_size(model=kind, tp=tp, shard_ranks=shard_ranks, ep=ep)
        counts: dict[tuple[int, int], int] = {}
        for each in unit_blocks(blocks=blocks, wrap_blocks=wrap_blocks):
            kept = each - max(0, min(recomputed, each))
            counts[each, kept] = counts.get((each, kept), 0) + 1
            recomputed -= each
        units += [
            BlockUnit(
                model=kind,
                blocks=each,
                size=_times(size, each),
                experts=_times(experts, each),
                number=number,
                kept_blocks=kept,
            )
            for (each, kept), number in counts.items()
        ]
    return tuple(units)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUnits:
    """FSDP units of what no block holds; nothing where there are none of a kind."""

    tables: UnitSize = NOTHING
    """The embedding's: gathered for forward alone, of which backward needs only indices."""
    head: UnitSize = NOTHING
    """With the final norm: gathered at the end of forward, and there until backward is past it."""
    root: UnitSize = NOTHING
    """The rest, or all: gathered first, and there until the end of backward."""


def end_units(case: Case, stage: Stage) -> EndUnits:
    """Units of embedding, final norm and head of a stage; none inside a pipeline."""
    return _end_units(
        case.model,
        stage.has_embedding,
        stage.has_head,
        tp=case.layout.tp,
        shard_ranks=case.layout.shard_ranks,
        apart=case.training.traits.units_of_ends,
    )


@lru_cache(maxsize=4096)
def _end_units(
    model: Model,
    has_embedding: bool,
    has_head: bool,
    *,
    tp: int,
    shard_ranks: int,
    apart: bool,
) -> EndUnits:
    tensors = root_tensors(model=model, has_embedding=has_embedding, has_head=has_head)
    if not apart or (has_embedding and has_head and model.tied_embeddings):
        return EndUnits(root=unit_size(tensors, tp=tp, shard_ranks=shard_ranks))
    tables = tuple(each for each in tensors if "_embeddings." in each.name and has_embedding)
    norms = tuple(each for each in tensors if each.name.startswith("embedding_norm."))
    head = tuple(each for each in tensors if each not in (*tables, *norms))
    sizes = (unit_size(each, tp=tp, shard_ranks=shard_ranks) for each in (tables, head, norms))
    return EndUnits(**dict(zip(("tables", "head", "root"), sizes, strict=True)))
