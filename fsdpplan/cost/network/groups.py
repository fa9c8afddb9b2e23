"""Groups: the process groups of a layout, by their shape.

A group takes every `stride`-th rank; the axes of the mesh, outermost first, are
`pp, dp_replicate, dp_shard, cp, tp`. Expert-parallel groups are cut out of `dp_shard * cp`, nearest
ranks first, as torchtitan and Megatron Core place them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.spec.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group by its shape: what placement on the network needs."""

    axis: str
    ranks: int
    stride: int
    """Ranks between neighbours of the group."""


def shard_group(layout: Layout) -> Group:
    """The ranks over which parameters, gradients or optimizer state are sharded."""
    axis = "dp_shard" if layout.cp == 1 else "dp_shard*cp"
    return Group(axis=axis, ranks=layout.shard_ranks, stride=layout.tp)


def regather_group(layout: Layout) -> Group:
    """The ranks from which backward gathers: fewer under an integer reshard."""
    whole = shard_group(layout)
    if isinstance(layout.reshard_after_forward, int):
        return Group(axis=whole.axis, ranks=layout.reshard_after_forward, stride=whole.stride)
    return whole


def replicate_group(layout: Layout) -> Group:
    """The ranks that hold copies of one shard."""
    return Group(
        axis="dp_replicate",
        ranks=layout.dp_replicate,
        stride=layout.shard_ranks * layout.tp,
    )


def data_parallel_group(layout: Layout) -> Group:
    """All ranks that see other tokens, replicas and shards: where whole gradients are reduced."""
    if layout.dp_replicate == 1:
        return shard_group(layout)
    if layout.shard_ranks == 1:
        return replicate_group(layout)
    return Group(
        axis=f"dp_replicate*{shard_group(layout).axis}",
        ranks=layout.dp_replicate * layout.shard_ranks,
        stride=layout.tp,
    )


def ep_group(layout: Layout) -> Group:
    """The ranks over which routed experts are split; neighbours where tensor-parallel ranks are
    among them."""
    stride = 1 if layout.experts_over_tp else layout.tp
    return Group(axis="ep", ranks=layout.expert_ranks, stride=stride)


def expert_shard_group(layout: Layout) -> Group:
    """The ranks over which the experts of one expert-parallel rank are sharded."""
    whole = shard_group(layout)
    if layout.ep == 1:
        return whole
    return Group(
        axis=f"{whole.axis}/ep",
        ranks=layout.shard_ranks // layout.ep,
        stride=layout.tp * layout.ep,
    )


def cp_group(layout: Layout) -> Group:
    """The ranks that split each sequence."""
    return Group(axis="cp", ranks=layout.cp, stride=layout.tp)


def tp_group(layout: Layout) -> Group:
    """The tensor-parallel ranks."""
    return Group(axis="tp", ranks=layout.tp, stride=1)


def pp_group(layout: Layout) -> Group:
    """The pipeline's ranks."""
    return Group(axis="pp", ranks=layout.pp, stride=layout.world // layout.pp)
