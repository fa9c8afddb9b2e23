"""Calls: equal calls of one collective, by group and bytes, in a step or inside a block.

Node copies: of a token's rows on their way to experts, those that must leave its node.

An all-to-all sends each of a token's k rows to the rank of its expert. Software that knows nodes
sends a token once to each node that has experts of it, over the network between them, and passes
it on inside. A router that chooses groups of experts first then bounds the copies by the groups.

Source: DeepSeek-V3, arXiv 2412.19437, sections 2.1.2 and 3.2.2; DeepEP, csrc/kernels/internode.cu.

Traded heads: the calls of all-to-all attention, which the trainer's CPU processes run.

Torch's ring attention has kernels for CUDA only. On CPU ranks that share a sequence trade heads for
tokens around attention: queries, keys and values in one call, the outputs in another. Counts and
bytes equal those of the trainer (tests/trainer).

Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3;
fsdpplan/trainer/parallel/context_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Literal

from fsdpplan.cost.block.sizes import traded_heads
from fsdpplan.cost.model.attention_kernel import EXTRA_WIDTH
from fsdpplan.cost.model.formats import local_tokens
from fsdpplan.cost.model.params import Place
from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import Group, Placement, cp_group, group_placement
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Experts, Model
from fsdpplan.spec.plan import Case, Collective
from fsdpplan.spec.training import DTYPE_BYTES


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
Overlap = Literal["none", "chunks", "inputs", "weights", "scores"]
"""How: not at all; matmul and collective cut into a chunk a rank; in whole, beside the matmul that
makes gradients of inputs, or of weights; step by step beside the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall(Calls):
    """Equal calls of one collective in one pass through one block."""

    count: int = 1
    """Calls a pass."""
    when: Pass
    place: Place
    """The stretch of the block whose operators it stands beside."""
    is_first: bool = False
    """It is waited for before what that stretch computes in this pass, and not behind it."""
    overlap: Overlap = "none"
    share: float = 1.0
    """Part of the time of what it runs beside."""


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


DISTURBING_FRACTION = 1 / 8
"""Wire rate of a collective, as a share of memory bandwidth, at which it disturbs kernels fully.

What a collective takes from kernels beside it are multiprocessors and memory traffic, both in
proportion to the bytes a second that it moves. NVLink's rate is about an eighth of memory
bandwidth from V100 (150 of 900 GB/s) to B200 (900 of 8000); a network's is far less.
"""


def full_rate_bytes_per_second(device: Device) -> float:
    """Wire rate at which a collective disturbs kernels fully."""
    return DISTURBING_FRACTION * device.memory_bandwidth_bytes_per_second


def activation_bytes(case: Case) -> int:
    """The residual stream of one micro-batch, unsplit: what TP gathers and stages hand over."""
    training = case.training
    tokens = local_tokens(training=training, layout=case.layout)
    return tokens * case.model.hidden * DTYPE_BYTES[training.activation_dtype]


def nodes_of(placement: Placement) -> int:
    """Nodes that a group of ranks lies on."""
    between = [placed for placed in placement.levels if placed.between_nodes]
    return between[0].inner_domains if between else 1


def leaving_share(experts: Experts, *, nodes: int) -> float:
    """Rows that leave the node of their token, as a share of all its k rows.

        (N - 1) / N * (nodes that a token visits) / k

    By symmetry its own node is one of those that it visits with the chance of any other.
    """
    if nodes <= 1:
        return 0.0
    return (nodes - 1) / nodes * visited_nodes(experts, nodes=nodes) / experts.active


@lru_cache(maxsize=256)
def visited_nodes(experts: Experts, *, nodes: int) -> float:
    """Nodes with one or more of a token's experts, in the mean, where experts lie in order over
    nodes and all choices are alike.

        N * (1 - sum over j of P(j of a node's groups chosen) * C(c e - j e, k) / C(c e, k))

    c groups of e experts are chosen, and k of their experts. At most as many nodes as groups.
    """
    router, each = experts.router, experts.experts / experts.router.groups
    chosen = router.groups_chosen if router.groups > 1 else 1
    there = experts.experts / nodes
    open_experts = chosen * each
    missed = 0.0
    a_node = router.groups / nodes
    if a_node >= 1:  # whole groups on a node
        groups_there = round(a_node)
        for j in range(min(groups_there, chosen) + 1):
            ways = comb(groups_there, j) * comb(router.groups - groups_there, chosen - j)
            share = ways / comb(router.groups, chosen)
            missed += share * _missed(open_experts, j * each, experts.active)
    else:  # a part of one group
        share = chosen / router.groups
        missed = 1 - share + share * _missed(open_experts, there, experts.active)
    return nodes * (1 - missed)


def _missed(of: float, there: float, active: int) -> float:
    """Chance that none of `active` of `of` experts is among `there` of them."""
    return comb(round(of - there), active) / comb(round(of), active)


def traded_heads_calls(case: Case) -> Iterator[BlockCall]:
    """Two all-to-alls a pass, all exposed.

    Recomputation repeats them, but that of attention alone ends before the second.
    """
    training, layout = case.training, case.layout
    tokens = local_tokens(training=training, layout=layout)
    into, out = traded_widths(case.model, layout)
    passes: list[tuple[Pass, int, bool]] = [("forward", into, True), ("forward", out, False)]
    if layout.activation_checkpointing != "none":
        passes.append(("recompute", into, True))
    if layout.activation_checkpointing in ("op", "full"):
        passes.append(("recompute", out, False))
    passes += [("backward", out, True), ("backward", into, False)]
    for when, width, is_first in passes:
        yield BlockCall(
            when=when,
            collective="all_to_all",
            group=cp_group(layout),
            dtype=training.activation_dtype,
            call_bytes=tokens * width * DTYPE_BYTES[training.activation_dtype],
            place="attention",
            is_first=is_first,
        )


def traded_widths(model: Model, layout: Layout) -> tuple[int, int]:
    """(widths of queries, keys and values together, width of the outputs) of one token on a
    rank."""
    heads = model.heads // layout.tp
    made = heads if model.latent else model.kv_heads // layout.tp
    heads, keys = traded_heads(heads, made, cp=layout.cp)
    key_width = model.head_dim + (EXTRA_WIDTH if model.positions == "alibi" else 0)
    value_width = model.value_dim // model.heads
    return heads * key_width + keys * (key_width + value_width), heads * value_width
