"""Weak spots slow what they name, only that, and taking the nodes away undoes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import WeakSpot
from fsdpplan.spec.weak import weak_nodes, weakened, without_nodes

CLUSTER = load_cluster("dgx-h100", gpus=32).cluster


def spot(node: str, fraction: float, level: str | None = "infiniband") -> WeakSpot:
    return WeakSpot(nodes=(node,), level=level, remaining_fraction=fraction, text="slow")


SPOTS = st.lists(
    st.builds(
        spot,
        st.sampled_from(["n01", "n02", "n03"]),
        st.floats(0.05, 1.0),
        st.sampled_from(["infiniband", "nvlink", None]),
    ),
    max_size=4,
)


def test_the_slowest_port_sets_the_level() -> None:
    slow = weakened(CLUSTER, [spot("n01", 0.5), spot("n02", 0.25)])
    assert slow.levels[1].port_bandwidth_bytes_per_second == pytest.approx(12.5e9)
    assert slow.levels[0] == CLUSTER.levels[0]
    assert weak_nodes(slow) == ("n01", "n02")


def test_without_the_slowest_node_the_next_one_sets_it() -> None:
    slow = weakened(CLUSTER, [spot("n01", 0.5), spot("n02", 0.25)])
    better = without_nodes(slow, ["n02"])
    assert better.levels[1].port_bandwidth_bytes_per_second == pytest.approx(25e9)


def test_nodes_of_one_spot_may_be_left_out_one_after_the_other() -> None:
    both = replace(spot("n01", 0.25), nodes=("n01", "n02"))
    slow = weakened(CLUSTER, [both])
    one_left = without_nodes(slow, ["n01"])
    assert weak_nodes(one_left) == ("n02",)
    assert one_left.levels == slow.levels
    assert without_nodes(one_left, ["n02"]).levels == CLUSTER.levels


@given(SPOTS)
def test_without_all_weak_nodes_the_cluster_is_as_it_was(spots: list[WeakSpot]) -> None:
    slow = weakened(CLUSTER, spots)
    healthy = without_nodes(slow, weak_nodes(slow))
    assert healthy.weak == ()
    for level, before in zip(healthy.levels, CLUSTER.levels, strict=True):
        assert level.port_bandwidth_bytes_per_second == pytest.approx(
            before.port_bandwidth_bytes_per_second
        )
    assert healthy.device.fit.sustained_fraction == pytest.approx(
        CLUSTER.device.fit.sustained_fraction
    )


@given(SPOTS)
def test_weak_spots_never_make_anything_faster(spots: list[WeakSpot]) -> None:
    slow = weakened(CLUSTER, spots)
    assert slow.device.fit.sustained_fraction <= CLUSTER.device.fit.sustained_fraction
    for level, before in zip(slow.levels, CLUSTER.levels, strict=True):
        assert level.port_bandwidth_bytes_per_second <= before.port_bandwidth_bytes_per_second


def test_a_level_that_is_not_there_is_refused() -> None:
    with pytest.raises(SpecError, match="names the level 'spine'"):
        weakened(CLUSTER, [spot("n01", 0.5, "spine")])


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_what_remains_is_a_share(fraction: float) -> None:
    with pytest.raises(SpecError, match="remaining_fraction"):
        spot("n01", fraction)
