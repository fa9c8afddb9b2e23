"""Calls: equal calls of one collective, by group and bytes, in a step or inside a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fsdpplan.cost.model.formats import local_tokens
from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import Group, group_placement
from fsdpplan.spec.case import Case
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Collective
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Equal calls of one collective."""

    collective: Collective
    group: Group
    dtype: str
    count: int
    """Calls a step."""
    call_bytes: int
    """Full buffer of one call."""
    leaving_share: float = 1.0
    """Most of an all-to-all's buffer that leaves a node."""


Pass = Literal["forward", "recompute", "backward"]
Piece = Literal["", "attention", "attention_in", "attention_out", "ffn_in", "ffn_out"]
"""What a collective runs beside: the scores, or the matmuls into and out of attention and of the
feed-forward network; empty: nothing."""
Overlap = Literal["none", "chunks", "inputs", "weights", "scores"]
"""How: not at all; matmul and collective cut into a chunk a rank; in whole, beside the matmul that
makes gradients of inputs, or of weights; step by step beside the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """Equal calls of one collective in one pass through one block."""

    when: Pass
    collective: Collective
    group: Group
    dtype: str
    call_bytes: int
    count: int = 1
    piece: Piece = ""
    overlap: Overlap = "none"
    share: float = 1.0
    """Part of the piece's time that the calls run beside."""
    leaving_share: float = 1.0
    """Most of an all-to-all's buffer that leaves a node."""


def repeats_whole_block(*, model: Model, training: Training) -> bool:
    """Whether recomputation makes a block's last output again: torch's stops once backward has all
    that it needs, and a norm behind the feed-forward network needs what it normalizes."""
    return training.traits.repeats_whole_block or model.post_norms


@lru_cache(maxsize=16384)
def group_seconds(
    cluster: Cluster,
    group: Group,
    collective: Collective,
    call_bytes: int,
    leaving_share: float = 1.0,
) -> float:
    """Seconds of one call of `collective` over `group`."""
    if group.ranks == 1:
        return 0.0
    placement = group_placement(cluster=cluster, ranks=group.ranks, stride=group.stride)
    return collective_seconds(
        collective=collective,
        gathered_bytes=call_bytes,
        placement=placement,
        leaving_share=leaving_share,
    )


@lru_cache(maxsize=4096)
def group_level(cluster: Cluster, group: Group) -> str:
    """Outermost level of the network that `group` spans."""
    return group_placement(cluster=cluster, ranks=group.ranks, stride=group.stride).level_name


def call_seconds(call: Calls, cluster: Cluster) -> float:
    """Seconds of all calls, one after another."""
    once = group_seconds(cluster, call.group, call.collective, call.call_bytes, call.leaving_share)
    return call.count * once


def activation_bytes(case: Case) -> int:
    """The residual stream of one micro-batch, unsplit: what TP gathers and stages hand over."""
    training = case.training
    tokens = local_tokens(training=training, layout=case.layout)
    return tokens * case.model.hidden * DTYPE_BYTES[training.activation_dtype]
