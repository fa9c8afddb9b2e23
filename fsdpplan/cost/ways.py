"""Ways: what of a layout decides a part of its step.

How gradients are reduced, how often, over how many ranks, decides nothing of what is inside a
block, and what is inside a block nothing of what FSDP moves; so the thousands of layouts of a
search have a few dozen kinds of blocks, and a few hundred of moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


@dataclass(frozen=True, slots=True)
class Ways:
    """A layout as far as a part of its step is concerned: equal to all that do the same."""

    decides: tuple[object, ...]
    """All that is read of it."""
    layout: Layout = field(compare=False)
    """One of them."""


def inner_ways(model: Model, training: Training, layout: Layout) -> tuple[object, ...]:
    """What decides the collectives inside a block, and what they run beside."""
    return (
        layout.tp,
        layout.cp,
        layout.expert_ways if model.experts else None,
        layout.micro_batch,
        layout.activation_checkpointing,
        layout.sequence_parallel,
        layout.async_tp,
        layout.compile,
        # one fp8 cast of a weight serves all of them
        layout.num_microbatches if training.fp8_recipe == "delayed" else 0,
    )


def block_ways(model: Model, training: Training, layout: Layout) -> tuple[object, ...]:
    """What decides all that a block does: with what data parallelism puts around it."""
    is_fsdp = layout.sharding == "fsdp"
    around = layout.wrap_blocks if is_fsdp else layout.data_parallel > 1
    return (is_fsdp, around, *inner_ways(model, training, layout))


def shard_ways(layout: Layout) -> tuple[object, ...]:
    """What decides what FSDP gathers, reduces and copies."""
    ranks = (layout.tp, layout.cp, *layout.expert_ways, layout.dp_shard, layout.dp_replicate)
    return (*ranks, layout.wrap_blocks, layout.reshard_after_forward, layout.offload)
