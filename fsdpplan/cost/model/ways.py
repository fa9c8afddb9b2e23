"""Ways: what of a case decides a part of its step.

How gradients are reduced, how often, over how many ranks, decides nothing of what is inside a
block, and what is inside a block nothing of what FSDP moves; so the thousands of layouts of a
search have a few dozen kinds of blocks, and a few hundred of moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdpplan.spec.case import Case


@dataclass(frozen=True, slots=True)
class Ways:
    """A case as far as a part of its step is concerned: equal to all that do the same."""

    decides: tuple[object, ...]
    """All that is read of it."""
    case: Case = field(compare=False)
    """One of them."""


def inner_ways(case: Case) -> Ways:
    """What decides the collectives inside a block, and what they run beside, on one cluster."""
    return Ways(_inside(case), case)


def block_ways(case: Case) -> Ways:
    """What decides all that a block does: with what data parallelism puts around it."""
    layout = case.layout
    is_fsdp = layout.sharding == "fsdp"
    around = layout.wrap_blocks if is_fsdp else layout.data_parallel > 1
    return Ways((case.cluster, is_fsdp, around, *_inside(case)), case)


def _inside(case: Case) -> tuple[object, ...]:
    model, training, layout = case.model, case.training, case.layout
    return (
        model,
        training,
        case.cluster.device.kind,
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


def shard_ways(case: Case) -> Ways:
    """What decides what FSDP gathers, reduces and copies."""
    layout = case.layout
    nouns = (case.model, case.cluster, case.training)
    ranks = (layout.tp, layout.cp, *layout.expert_ways, layout.dp_shard, layout.dp_replicate)
    policies = (layout.wrap_blocks, layout.reshard_after_forward, layout.offload)
    return Ways((*nouns, *ranks, *policies), case)
