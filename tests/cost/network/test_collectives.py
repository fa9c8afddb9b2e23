"""Times of collectives: textbook formulas, laws that any network keeps, published tables."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.network.collectives import SIMPLE, collective_seconds, wire_bytes
from fsdpplan.cost.network.placement import PlacedLevel, Placement, group_placement
from fsdpplan.spec.cluster import Cluster, LowLatency
from fsdpplan.spec.plan import Collective
from tests.cost.clusters import cluster, golden, groups

TABLE = golden("collectives")
COLLECTIVES = st.sampled_from(get_args(Collective))
BYTES = st.integers(1, 10**11)
RANKS = st.integers(2, 1024)


def one_level(*, ranks: int, bandwidth: float, latency: float) -> Placement:
    """`ranks` in a row, by links that only have a bandwidth and a latency."""
    node = cluster("dgx-h100", gpus=8)
    plain = replace(
        node.levels[0],
        domain_gpus=ranks,
        port_bandwidth_bytes_per_second=bandwidth,
        latency_seconds=latency,
        bandwidth_fraction=1.0,
        half_bandwidth_bytes=0.0,
        multicast_fraction=0.0,
        base_seconds=0.0,
        start_seconds=0.0,
        low_latency="none",
    )
    built = replace(node, gpus=ranks, gpus_per_node=ranks, levels=(plain,))
    placement = group_placement(cluster=built, ranks=ranks, stride=1)
    return replace(placement, memory_bytes_per_second=inf)


def textbook_ring_seconds(
    *, passes: int, gathered_bytes: float, ranks: int, bandwidth: float, hop_seconds: float
) -> float:
    """(n - 1) steps a pass, each of a hop and an n-th of the buffer."""
    return passes * (ranks - 1) * (hop_seconds + gathered_bytes / ranks / bandwidth)


@pytest.mark.parametrize("row", TABLE["ring"], ids=lambda row: row["claim"])
def test_worked_ring_all_reduces(row: dict[str, Any]) -> None:
    wire = wire_bytes(
        collective="all_reduce", gathered_bytes=row["gathered_bytes"], ranks=row["ranks"]
    )
    seconds = wire / row["bandwidth_bytes_per_second"]
    assert seconds == pytest.approx(row["seconds"], rel=row["tolerance_fraction"])


@given(
    st.sampled_from([("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)]),
    BYTES,
    RANKS,
    st.floats(1e6, 1e12),
    st.floats(0, 1e-3),
)
def test_over_plain_links_a_ring_takes_what_the_textbook_says(
    collective: tuple[Collective, int],
    gathered_bytes: int,
    ranks: int,
    bandwidth: float,
    hop: float,
) -> None:
    """An all-reduce may climb trees instead, which have the ring's volume and less latency."""
    name, passes = collective
    found = collective_seconds(
        collective=name,
        gathered_bytes=gathered_bytes,
        placement=one_level(ranks=ranks, bandwidth=bandwidth, latency=hop),
    )
    ring = textbook_ring_seconds(
        passes=passes,
        gathered_bytes=gathered_bytes,
        ranks=ranks,
        bandwidth=bandwidth,
        hop_seconds=hop + SIMPLE.inner_hop_seconds,
    )
    if name == "all_reduce":
        volume = wire_bytes(collective=name, gathered_bytes=gathered_bytes, ranks=ranks)
        assert volume / bandwidth <= found <= ring * (1 + 1e-9)
    else:
        assert found == pytest.approx(ring, rel=1e-9)


def test_an_all_gather_moves_all_but_the_own_share() -> None:
    moved = wire_bytes(collective="all_gather", gathered_bytes=1000, ranks=8)
    assert moved == 1000 * 7 / 8


@given(COLLECTIVES, BYTES)
def test_one_rank_communicates_nothing(collective: Collective, gathered_bytes: int) -> None:
    placement = group_placement(cluster=cluster(), ranks=1, stride=1)
    seconds = collective_seconds(
        collective=collective, gathered_bytes=gathered_bytes, placement=placement
    )
    assert seconds == 0
    assert wire_bytes(collective=collective, gathered_bytes=gathered_bytes, ranks=1) == 0


@given(groups(), COLLECTIVES, BYTES, BYTES)
def test_more_bytes_are_never_faster(
    drawn: tuple[Cluster, int, int], collective: Collective, first: int, second: int
) -> None:
    placement = group_placement(cluster=drawn[0], ranks=drawn[1], stride=drawn[2])
    fewer, more = sorted((first, second))
    assert collective_seconds(
        collective=collective, gathered_bytes=fewer, placement=placement
    ) <= collective_seconds(collective=collective, gathered_bytes=more, placement=placement)


@given(groups(), COLLECTIVES, BYTES, st.floats(1, 10), st.integers(0, 1))
def test_a_faster_link_is_never_slower(
    drawn: tuple[Cluster, int, int],
    collective: Collective,
    gathered_bytes: int,
    factor: float,
    index: int,
) -> None:
    built, ranks, stride = drawn
    levels = list(built.levels)
    bandwidth = levels[index].port_bandwidth_bytes_per_second * factor
    levels[index] = replace(levels[index], port_bandwidth_bytes_per_second=bandwidth)
    slow, fast = (
        collective_seconds(
            collective=collective,
            gathered_bytes=gathered_bytes,
            placement=group_placement(cluster=chosen, ranks=ranks, stride=stride),
        )
        for chosen in (built, replace(built, levels=tuple(levels)))
    )
    assert fast <= slow * (1 + 1e-12)


@given(groups(), COLLECTIVES, BYTES)
def test_nothing_is_faster_than_the_cut_allows(
    drawn: tuple[Cluster, int, int], collective: Collective, gathered_bytes: int
) -> None:
    built, ranks, stride = drawn
    placement = group_placement(cluster=built, ranks=ranks, stride=stride)
    seconds = collective_seconds(
        collective=collective, gathered_bytes=gathered_bytes, placement=placement
    )
    for placed in placement.levels:
        cut_bytes = _least_cut_bytes(collective, gathered_bytes, placed, ranks)
        assert seconds >= cut_bytes / placed.bandwidth_bytes_per_second * (1 - 1e-9)


def _least_cut_bytes(
    collective: Collective, gathered_bytes: float, placed: PlacedLevel, ranks: int
) -> float:
    """What must leave one domain of the level below, whatever the algorithm."""
    branches = -(-placed.inner_domains // placed.domains)
    if branches == 1:
        return 0.0
    inside = placed.inner_ranks
    match collective:
        case "all_gather" | "reduce_scatter":
            return gathered_bytes * inside / ranks
        case "all_reduce":  # a switch may reduce: then the own share of the sum need not leave
            return gathered_bytes
        case "all_to_all":
            return gathered_bytes * inside * (ranks - inside) / ranks
        case _:
            return 0.0


@given(groups(), BYTES)
def test_a_ring_gathers_no_faster_than_its_bus(
    drawn: tuple[Cluster, int, int], gathered_bytes: int
) -> None:
    built, ranks, stride = drawn
    placement = group_placement(cluster=built, ranks=ranks, stride=stride)
    seconds = collective_seconds(
        collective="all_gather", gathered_bytes=gathered_bytes, placement=placement
    )
    moved = wire_bytes(collective="all_gather", gathered_bytes=gathered_bytes, ranks=ranks)
    assert seconds >= moved / placement.bandwidth_bytes_per_second


@given(groups(), BYTES)
def test_all_reduce_is_never_slower_than_its_two_halves(
    drawn: tuple[Cluster, int, int], gathered_bytes: int
) -> None:
    placement = group_placement(cluster=drawn[0], ranks=drawn[1], stride=drawn[2])
    whole, scatter, gather = (
        collective_seconds(
            collective=collective, gathered_bytes=gathered_bytes, placement=placement
        )
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
    )
    # chunks grow with the bytes of a call, and one call of two passes has twice those of one
    assert whole <= (scatter + gather) * 1.01


def test_the_switch_reduces_faster_than_a_ring_over_eight_but_not_over_two() -> None:
    node = cluster("dgx-h100", gpus=8)
    plain = replace(node, levels=(replace(node.levels[0], multicast_fraction=0.0),))
    for ranks, is_faster in ((8, True), (2, False)):
        with_switch, without = (
            collective_seconds(
                collective="all_reduce",
                gathered_bytes=2**30,
                placement=group_placement(cluster=chosen, ranks=ranks, stride=1),
            )
            for chosen in (node, plain)
        )
        assert (with_switch < without) is is_faster


def test_neighbours_on_other_nodes_are_slower_to_reach_than_those_inside() -> None:
    built = cluster("dgx-h100", gpus=64)
    inside, across = (
        collective_seconds(
            collective="send_recv",
            gathered_bytes=2**26,
            placement=group_placement(cluster=built, ranks=8, stride=stride),
        )
        for stride in (1, 8)
    )
    assert across > 4 * inside


@given(st.integers(1, 2**28), st.sampled_from(["none", "ll", "ll128"]))
def test_a_protocol_more_is_never_slower(gathered_bytes: int, capable: LowLatency) -> None:
    node = cluster("dgx-h100", gpus=8)
    less, more = (
        collective_seconds(
            collective="all_gather",
            gathered_bytes=gathered_bytes,
            placement=group_placement(
                cluster=replace(node, levels=(replace(node.levels[0], low_latency=chosen),)),
                ranks=8,
                stride=1,
            ),
        )
        for chosen in (capable, "ll128")
    )
    assert more <= less


def test_small_all_reduces_over_a_thousand_ranks_climb_trees() -> None:
    """DDP's 25 MiB bucket: a ring's thousand hops would cost milliseconds."""
    seconds = [
        collective_seconds(
            collective="all_reduce",
            gathered_bytes=25 * 2**20,
            placement=group_placement(cluster=cluster("dgx-h100", gpus=gpus), ranks=gpus, stride=1),
        )
        for gpus in (64, 1024)
    ]
    assert seconds[1] < 2 * seconds[0] < 1e-3


@given(groups(), st.sampled_from(["all_gather", "all_to_all"]), BYTES)
def test_more_bandwidth_between_nodes_than_inside_is_no_gain(
    drawn: tuple[Cluster, int, int], collective: Collective, gathered_bytes: int
) -> None:
    """The slowest level sets the pace: widening another one only shortens its filling."""
    built, ranks, stride = drawn
    placement = group_placement(cluster=built, ranks=ranks, stride=stride)
    seconds = collective_seconds(
        collective=collective, gathered_bytes=gathered_bytes, placement=placement
    )
    wide = replace(built.levels[-1], port_bandwidth_bytes_per_second=1e15)
    placement = group_placement(
        cluster=replace(built, levels=(built.levels[0], wide)), ranks=ranks, stride=stride
    )
    widened = collective_seconds(
        collective=collective, gathered_bytes=gathered_bytes, placement=placement
    )
    inner_bytes = gathered_bytes * (ranks - 1) / ranks
    if placement.levels:
        assert widened >= inner_bytes / placement.levels[0].bandwidth_bytes_per_second * (1 - 1e-9)
    assert widened <= seconds * (1 + 1e-9)


def test_an_exchange_between_nodes_pays_a_hop_for_eight_messages() -> None:
    """A mixture over a thousand ranks does not wait for a thousand hops in a row."""

    def exchange_seconds(nodes: int) -> float:
        built = cluster("dgx-h100", gpus=8 * nodes)
        return collective_seconds(
            collective="all_to_all",
            gathered_bytes=2**10,
            placement=group_placement(cluster=built, ranks=nodes, stride=8),
        )

    ring = collective_seconds(
        collective="all_gather",
        gathered_bytes=2**10,
        placement=group_placement(cluster=cluster("dgx-h100", gpus=1032), ranks=129, stride=8),
    )
    start = exchange_seconds(2)
    assert exchange_seconds(9) == pytest.approx(start, rel=0.01)
    assert exchange_seconds(129) - start < (ring - start) / 7
