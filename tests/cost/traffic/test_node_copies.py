"""Node copies: how many nodes a token's experts lie on."""

from __future__ import annotations

from itertools import combinations

import pytest

from fsdpplan.cost.network.placement import group_placement
from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.cost.traffic.calls import group_seconds, leaving_share, nodes_of, visited_nodes
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.model import Experts, Router
from tests.cost.problems import case

DEEPSEEK = load_model("deepseek-v3").experts
assert DEEPSEEK is not None


def counted(experts: Experts, nodes: int) -> float:
    """The mean over every choice that a router can make."""
    router, each = experts.router, experts.experts // experts.router.groups
    chosen = router.groups_chosen if router.groups > 1 else 1
    totals = []
    for groups in combinations(range(router.groups), chosen):
        there = [group * each + one for group in groups for one in range(each)]
        totals += [
            len({one * nodes // experts.experts for one in some})
            for some in combinations(there, experts.active)
        ]
    return sum(totals) / len(totals)


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize(
    "experts",
    [
        Experts(experts=16, active=3, hidden=64),
        Experts(experts=16, active=3, hidden=64, router=Router(groups=4, groups_chosen=2)),
        Experts(experts=16, active=4, hidden=64, router=Router(groups=8, groups_chosen=3)),
    ],
)
def test_nodes_of_a_token_are_those_of_all_choices_in_the_mean(
    experts: Experts, nodes: int
) -> None:
    assert visited_nodes(experts, nodes=nodes) == pytest.approx(counted(experts, nodes))


def test_a_token_of_deepseek_visits_four_nodes_at_most() -> None:
    assert 3.5 < visited_nodes(DEEPSEEK, nodes=8) < 4
    assert visited_nodes(DEEPSEEK, nodes=1) == 1
    assert leaving_share(DEEPSEEK, nodes=1) == 0
    # 8 rows of which 7/8 would leave; 3.6 copies of which 7/8 do
    assert leaving_share(DEEPSEEK, nodes=8) == pytest.approx(0.397, abs=0.001)


def test_an_exchange_over_the_network_is_shorter_by_what_stays() -> None:
    cluster = load_cluster("hgx-h800-ndr", gpus=64).cluster
    asked = case(
        load_model("deepseek-v3"), dp_shard=64, ep=64, profile="hgx-h800-ndr", seq_len=4096
    )
    call, back = [one for one in block_calls(asked) if one.when == "forward"]
    assert (call.place, back.place) == ("ffn_in", "ffn_out")
    assert call.call_bytes == back.call_bytes
    placement = group_placement(cluster=cluster, ranks=64, stride=1)
    assert nodes_of(placement) == 8
    given = (cluster, call.group, call.collective, call.call_bytes)
    ratio = group_seconds(*given, leaving_share(DEEPSEEK, nodes=8)) / group_seconds(*given)
    assert 0.397 / 0.875 <= ratio < 0.6
