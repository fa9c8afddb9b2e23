"""Node copies: of a token's rows on their way to experts, those that must leave its node.

An all-to-all sends each of a token's k rows to the rank of its expert. Software that knows nodes
sends a token once to each node that has experts of it, over the network between them, and passes
it on inside. A router that chooses groups of experts first then bounds the copies by the groups.

Source: DeepSeek-V3, arXiv 2412.19437, sections 2.1.2 and 3.2.2; DeepEP, csrc/kernels/internode.cu.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from fsdpplan.cost.network.placement import Placement
from fsdpplan.spec.model import Experts


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
