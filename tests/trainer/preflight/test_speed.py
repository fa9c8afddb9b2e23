"""Whether measured links are what the plan counts on, and which node holds them back."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.network.placement import group_placement
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import Cluster
from fsdpplan.trainer.config import ClusterConfig, parse_plan
from fsdpplan.trainer.preflight.speed import (
    PAIR_ROUNDS,
    Promise,
    Speed,
    Where,
    judge_speeds,
    levels,
    levels_words,
    pair_rounds,
    promised,
)
from tests.trainer.plans import plan_document

MIB = 2**20
NVLINK = Promise(level="nvlink", bytes_per_second=400e9)
INFINIBAND = Promise(level="infiniband", bytes_per_second=40e9)
PROMISES = {"inside": NVLINK, "between": INFINIBAND}
NO_PROMISES = {"inside": None, "between": None}


def inside(*rates: float) -> list[Speed]:
    return [
        Speed(where="inside", hosts=(f"n{node}",), bytes_per_second=rate)
        for node, rate in enumerate(rates)
    ]


def pairs(nodes: int, slow: set[int], *, rate: float = 40e9, left: float = 0.3) -> list[Speed]:
    """Pairs as they are tried; one with a slow node has what is left."""
    return [
        Speed(
            where="pair",
            hosts=(f"n{a}", f"n{b}"),
            bytes_per_second=rate * (left if {a, b} & slow else 1),
        )
        for pairs in pair_rounds(nodes)
        for a, b in pairs
    ]


@given(st.integers(0, 65))
def test_each_node_meets_different_partners(nodes: int) -> None:
    rounds = pair_rounds(nodes)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(set(met)) == len(met)
    assert all(len(pair) == 2 and max(pair) < nodes for pair in met)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(set(busy)) == len(busy) >= nodes - 1
    assert len(rounds) == (0 if nodes < 3 else min(PAIR_ROUNDS, nodes - 1 + nodes % 2))


@given(st.integers(3, 40), st.data())
def test_a_slow_node_is_found_by_its_partners(nodes: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, nodes - 1))
    found = judge_speeds(pairs(nodes, {slow}), PROMISES, is_cpu=False)
    assert list(found.bad) == [f"n{slow}"]
    assert f"n{slow}: 12 GB/s with each other node tried, others reach 40 GB/s" == found.problem


@pytest.mark.parametrize("slow", [*combinations(range(8), 2)])
def test_partners_of_slow_nodes_are_cleared_by_good_ones(slow: tuple[int, int]) -> None:
    found = judge_speeds(pairs(8, set(slow)), PROMISES, is_cpu=False)
    assert set(found.bad) == {f"n{node}" for node in slow}


def test_a_node_is_compared_with_the_others_inside() -> None:
    found = judge_speeds(inside(400e9, 100e9, 390e9), PROMISES, is_cpu=False)
    assert found.problem == "n1: 100 GB/s between its GPUs, others reach 400 GB/s"


def test_all_below_the_plan_are_a_plan_to_calibrate() -> None:
    found = judge_speeds([*inside(390e9, 410e9), *pairs(4, {0, 1, 2, 3})], PROMISES, is_cpu=False)
    assert not found.problem
    assert not found.bad
    levels_found = levels(
        [Speed(where="between", hosts=("n0", "n1"), bytes_per_second=12e9)], PROMISES
    )
    assert levels_words(levels_found) == "infiniband 12 of 40 GB/s"
    found = judge_speeds(
        [Speed(where="between", hosts=("n0", "n1"), bytes_per_second=12e9)],
        PROMISES,
        is_cpu=False,
    )
    (warning,) = found.warnings
    assert warning.startswith("infiniband is slower than the plan's profile: 40 GB/s were promised")
    assert "fsdpplan calibrate" in warning


def test_faster_than_promised_is_not_wanted_of_all() -> None:
    assert not judge_speeds(inside(900e9, 390e9), PROMISES, is_cpu=False).problem


@given(st.lists(st.floats(1e6, 1e12), min_size=1, max_size=12), st.booleans())
def test_never_more_than_half_are_slow_and_never_the_fastest(
    rates: list[float], is_cpu: bool
) -> None:
    found = judge_speeds(inside(*rates), NO_PROMISES, is_cpu=is_cpu)
    assert 2 * len(found.bad) <= len(rates)
    assert f"n{rates.index(max(rates))}" not in found.bad
    assert bool(found.problem) == bool(found.bad)


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6))
def test_processes_that_share_a_machine_are_not_called_slow(shares: list[float]) -> None:
    assert not judge_speeds(inside(*shares), NO_PROMISES, is_cpu=True).problem


def test_no_more_than_what_ran_is_told() -> None:
    assert levels([], PROMISES) == ()
    assert levels_words(levels(inside(0.5e9), NO_PROMISES)) == "inside nodes 0.5 GB/s"


def config_of(cluster: Cluster) -> ClusterConfig:
    """A planned cluster as the trainer reads it."""
    document = plan_document(dp_shard=cluster.gpus, micro_batch=1)
    return parse_plan(json.dumps(document | {"cluster": asdict(cluster)})).cluster


@pytest.mark.parametrize(
    "profile",
    [
        "dgx-h100",
        "p5-48xlarge",
        "gb200-nvl72",
        "oci-bm-gpu-a10-4",
        "azure-nd-a100-v4",
        "dgx-1v-16g",
    ],
)
@pytest.mark.parametrize("where", ["inside", "between"])
def test_what_is_promised_is_what_the_plan_counted_on(profile: str, where: Where) -> None:
    nodes, sent = 4, 64.0 * MIB
    per_node = load_cluster(profile).cluster.gpus_per_node
    cluster = load_cluster(profile, gpus=nodes * per_node).cluster
    placement = group_placement(
        cluster=cluster,
        ranks=per_node if where == "inside" else nodes,
        stride=1 if where == "inside" else per_node,
    )
    expected = min(
        placed.bandwidth_bytes_per_second
        * placed.level.bandwidth_fraction
        / (1 + placed.level.half_bandwidth_bytes / (sent + placed.level.half_bandwidth_bytes))
        for placed in placement.levels
    )
    found = promised(config_of(cluster), where, nodes=nodes, per_node=per_node, sent_bytes=sent)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(expected)


@pytest.mark.parametrize("gpus", [128, 144, 96])
def test_of_a_part_of_each_nvlink_domain_is_promised_what_the_plan_counted_on(gpus: int) -> None:
    cluster, sent = load_cluster("gb200-nvl72", gpus=gpus).cluster, 64.0 * MIB
    nodes, per_node = cluster.nodes, cluster.gpus_per_node
    placement = group_placement(cluster=cluster, ranks=nodes, stride=per_node)
    expected = min(
        placed.bandwidth_bytes_per_second
        * placed.level.bandwidth_fraction
        / (1 + placed.level.half_bandwidth_bytes / (sent + placed.level.half_bandwidth_bytes))
        for placed in placement.levels
    )
    found = promised(config_of(cluster), "between", nodes=nodes, per_node=per_node, sent_bytes=sent)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(expected)


def test_nobody_promises_anything_of_cpus() -> None:
    cluster = config_of(load_cluster("cpu", gpus=4, gpus_per_node=2).cluster)
    assert promised(cluster, "inside", nodes=2, per_node=2, sent_bytes=MIB) is None
