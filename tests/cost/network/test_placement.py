"""Where groups fall on the network, and what they get there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from fsdpplan.cost.network.placement import group_placement
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import Cluster
from tests.cost.clusters import cluster, golden, groups

TABLE = golden("placement")


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["claim"])
def test_bus_bandwidth_of_worked_placements(row: dict[str, Any]) -> None:
    found = group_placement(
        cluster=cluster(row["profile"], gpus=row["gpus"]),
        ranks=row["ranks"],
        stride=row["stride"],
        groups_at_once=row.get("groups_at_once"),
    ).bandwidth_bytes_per_second
    assert found == pytest.approx(
        row["bus_bandwidth_bytes_per_second"], rel=TABLE["tolerance_fraction"]
    )


@given(groups())
def test_spread_over_nodes_is_that_of_counting_ranks(drawn: tuple[Cluster, int, int]) -> None:
    built, ranks, stride = drawn
    placement = group_placement(cluster=built, ranks=ranks, stride=stride)
    members = _members(built, ranks, stride)
    touched = max(len(set(nodes)) for nodes in members)
    assert (placement.level_name == "infiniband") == (touched > 1)
    if touched == 1:
        return
    outer = placement.levels[-1]
    assert outer.inner_domains == touched
    leaving = [nodes for nodes in members if len(set(nodes)) > 1]
    assert outer.inner_ranks == min(nodes.count(node) for nodes in leaving for node in set(nodes))
    assert outer.groups == max(
        sum(node in nodes for nodes in leaving) for node in range(built.nodes)
    )


def _members(built: Cluster, ranks: int, stride: int) -> list[list[int]]:
    """For each group, the node of each of its ranks."""
    block = ranks * stride
    starts = [b + r for b in range(0, built.gpus, block) for r in range(stride)]
    return [[(start + i * stride) // built.gpus_per_node for i in range(ranks)] for start in starts]


@given(groups())
def test_all_groups_together_never_get_more_than_the_ports_of_a_node(
    drawn: tuple[Cluster, int, int],
) -> None:
    built, ranks, stride = drawn
    placement = group_placement(cluster=built, ranks=ranks, stride=stride)
    for placed in placement.levels:
        ports = placed.level.ports * placed.level.port_bandwidth_bytes_per_second
        assert placed.groups * placed.bandwidth_bytes_per_second <= ports * (1 + 1e-9)


@given(groups())
def test_fewer_groups_at_once_are_never_slower(drawn: tuple[Cluster, int, int]) -> None:
    built, ranks, stride = drawn
    together = group_placement(cluster=built, ranks=ranks, stride=stride).bandwidth_bytes_per_second
    alone = group_placement(
        cluster=built, ranks=ranks, stride=stride, groups_at_once=1
    ).bandwidth_bytes_per_second
    assert alone >= together


def test_without_gpudirect_data_crosses_the_host_link_twice() -> None:
    direct = cluster("dgx-h100", gpus=16)
    levels = (direct.levels[0], replace(direct.levels[1], gpudirect=False))
    through_host = replace(direct, levels=levels)
    bandwidth = group_placement(cluster=through_host, ranks=2, stride=8).bandwidth_bytes_per_second
    assert bandwidth == direct.device.host_link_bytes_per_second / 2


def test_a_slow_port_slows_the_whole_ring() -> None:
    healthy = cluster("dgx-h100", gpus=64)
    slow = replace(healthy.levels[1], port_bandwidth_bytes_per_second=10e9)
    degraded = replace(healthy, levels=(healthy.levels[0], slow))
    assert group_placement(cluster=degraded, ranks=64, stride=1).bandwidth_bytes_per_second == 80e9


def test_one_rank_is_on_no_level() -> None:
    placement = group_placement(cluster=cluster(), ranks=1, stride=8)
    assert placement.levels == ()
    assert placement.level_name == "none"
    assert placement.bandwidth_bytes_per_second == float("inf")


def test_groups_that_do_not_tile_the_cluster_are_refused() -> None:
    with pytest.raises(SpecError, match="do not tile 64 GPUs"):
        group_placement(cluster=cluster(), ranks=3, stride=1)


@pytest.mark.parametrize("profile", ["gb200-nvl72", "gb300-nvl72"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_groups_of_a_power_of_two_stay_in_a_rack_of_which_64_of_72_gpus_are_used(
    profile: str, ranks: int
) -> None:
    racks = load_cluster(profile, gpus=512).cluster
    placement = group_placement(cluster=racks, ranks=ranks, stride=1)
    assert placement.level_name == "nvlink"
    assert placement.bandwidth_bytes_per_second == 900e9


def test_groups_of_32_and_64_cross_racks_that_are_filled_one_after_another() -> None:
    racks = load_cluster("gb200-nvl72", gpus=512, domain_gpus=72).cluster
    for ranks in (32, 64):
        placement = group_placement(cluster=racks, ranks=ranks, stride=1)
        assert placement.level_name == "infiniband"
        assert placement.bandwidth_bytes_per_second <= 8 * 50e9


def test_of_a_part_of_a_rack_only_its_own_ports_are_driven() -> None:
    racks = load_cluster("gb200-nvl72", gpus=128).cluster
    whole = group_placement(cluster=racks, ranks=128, stride=1)
    assert whole.levels[-1].bandwidth_bytes_per_second == 64 * 50e9
