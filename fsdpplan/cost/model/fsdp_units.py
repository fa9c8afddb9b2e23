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
    root_size,
    unit_blocks,
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


def root_unit(case: Case, stage: Stage) -> UnitSize:
    """Embedding, final norm and head of a stage; nothing inside a pipeline."""
    layout = case.layout
    return root_size(
        model=case.model,
        tp=layout.tp,
        shard_ranks=layout.shard_ranks,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    )
