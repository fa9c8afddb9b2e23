"""Where more machines do not pay, recommend says so, with the price of both."""

from __future__ import annotations

from functools import cache

import pytest

from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.advice.alternatives import (
    RecommendedPlan,
    advice,
    keeping_fraction,
    with_shares,
)
from fsdpplan.search.pins import Pins
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.cluster import Cluster, WeakSpot
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.spec.weak import weakened

DENSE_8B = load_model("llama-3.1-8b")


@cache
def job(cluster: Cluster, model: Model = DENSE_8B, batch: int = 256) -> RecommendedPlan:
    asked = Training(seq_len=4096, global_batch=batch)
    found = recommend(model=model, cluster=cluster, training=asked, pins=Pins(pp=1), limit=1)
    return RecommendedPlan(model=model, cluster=cluster, training=asked, best=found.ranked[0])


def slow_network(gpus: int, bytes_per_second: float) -> Cluster:
    return load_cluster(
        "dgx-h100", gpus=gpus, inter_bandwidth_bytes_per_second=bytes_per_second
    ).cluster


def test_a_fast_network_needs_no_advice() -> None:
    assert advice(job(load_cluster("dgx-h100", gpus=32).cluster), parts=()) == ()


def test_a_weak_node_is_priced_by_the_same_layout_without_it() -> None:
    healthy = slow_network(32, 10e9)
    spot = WeakSpot(nodes=("n03",), level="infiniband", remaining_fraction=0.1, text="slow")
    asked = job(weakened(healthy, [spot]))
    extra = keeping_fraction(asked, ["n03"])
    assert extra > 0.05
    said = next(text for text in advice(asked, parts=()) if text.startswith("keeping n03"))
    assert f"{extra:.1%}".replace("%", " %") in said
    assert "emit-launch --exclude n03" in said


def test_a_weak_node_that_hardly_matters_is_said_to() -> None:
    spot = WeakSpot(nodes=("n03",), level="infiniband", remaining_fraction=0.99, text="slow")
    said = advice(job(weakened(slow_network(32, 50e9), [spot])), parts=())
    assert any("costs less than 1 %" in text for text in said)


@pytest.mark.parametrize(("num_old", "is_worth_saying"), [(2, True), (0, False)])
def test_nodes_that_are_faster_alone_are_said_to_be(num_old: int, is_worth_saying: bool) -> None:
    new = load_cluster("dgx-h100", gpus=48).cluster
    old = load_cluster("dgx-a100-80g-hdr", gpus=64).cluster
    asked = job(old if num_old else load_cluster("dgx-h100", gpus=64).cluster)
    said = advice(asked, parts=(new,))
    assert any("nodes with h100-sxm-80g alone" in text for text in said) is is_worth_saying


def test_whole_racks_are_comparedwith_shares_of_a_power_of_two_of_more_racks() -> None:
    """576 GPUs fill eight racks, or 64 of the 72 in each of nine."""
    mixture = load_model("qwen3-30b-a3b")
    racks = load_cluster("gb200-nvl72", gpus=576).cluster
    said = advice(job(racks, mixture, batch=576), parts=())
    shares = [text for text in said if "--domain-gpus 64" in text]
    by_hand = load_cluster("gb200-nvl72", gpus=576, domain_gpus=64).cluster
    whole, shared = (
        job(cluster, mixture, batch=576).best.estimate.tokens_per_second
        for cluster in (racks, by_hand)
    )
    assert bool(shares) == (shared >= 1.03 * whole)
    assert not any("--domain-gpus" in text for text in advice(job(by_hand, mixture, 576), parts=()))


def test_shares_are_those_that_are_loaded() -> None:
    racks = load_cluster("gb300-nvl72", gpus=576).cluster
    assert with_shares(racks, 64) == load_cluster("gb300-nvl72", gpus=576, domain_gpus=64).cluster
