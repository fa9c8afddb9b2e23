"""Host: copies, additions and optimizers of offload, at the rate of a node's own memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.kernels.optimizer import (
    ASSUMED_NODE_BYTES_PER_SECOND,
    adding_seconds,
    host_bytes_per_second,
    link_bytes_per_second,
    pinned_copy_seconds,
)
from fsdpplan.cost.model.shards import stage_shard_elements, whole_model
from fsdpplan.spec.cluster import Cluster
from tests.cost.clusters import cluster
from tests.cost.problems import case

NODE = cluster("dgx-h100", gpus=8)


def with_host(node: Cluster, *, memory: float = 1.0, link: float = 1.0) -> Cluster:
    """A node whose memory and links are so many times as fast."""
    assert node.host_memory_bytes_per_second is not None
    rate = link * node.device.host_link_bytes_per_second
    return replace(
        node,
        host_memory_bytes_per_second=memory * node.host_memory_bytes_per_second,
        device=replace(node.device, host_link_bytes_per_second=rate),
    )


def seconds(node: Cluster = NODE, **layout: object) -> float:
    """The step of a small model with its state on the host."""
    asked = {"dp_shard": 8, "offload": "cpu", "num_microbatches": 3} | layout
    return replace(case(**asked), cluster=node).seconds


def test_memory_is_shared_by_the_devices_of_a_node() -> None:
    share = host_bytes_per_second(NODE)
    assert share == pytest.approx(0.6 * 614.4e9 / 8)
    assert host_bytes_per_second(replace(NODE, gpus=4, gpus_per_node=4)) == 2 * share
    unknown = replace(NODE, host_memory_bytes_per_second=None)
    assert host_bytes_per_second(unknown) == pytest.approx(0.6 * ASSUMED_NODE_BYTES_PER_SECOND / 8)


def test_a_copy_waits_for_the_link_or_for_memory() -> None:
    by_memory = link_bytes_per_second(NODE)
    assert by_memory == host_bytes_per_second(NODE)
    alone = replace(NODE, gpus=1, gpus_per_node=1)
    assert link_bytes_per_second(alone) == pytest.approx(0.9 * 64e9)


def test_adding_copies_into_fresh_pages_first() -> None:
    elements = 10**9
    copied, added = 4 * elements / 3.5e9, 12 * elements / host_bytes_per_second(NODE)
    assert adding_seconds(elements, NODE) == pytest.approx(copied + added)
    assert adding_seconds(elements, NODE) > pinned_copy_seconds(elements, NODE)


@given(
    memory=st.floats(0.1, 1.0),
    link=st.floats(0.1, 1.0),
    sync=st.sampled_from(("every", "last")),
    number=st.integers(1, 4),
)
def test_a_slower_host_never_makes_a_step_faster(
    memory: float, link: float, sync: str, number: int
) -> None:
    layout = {"gradient_sync": sync, "num_microbatches": number}
    slower = with_host(NODE, memory=memory, link=link)
    assert seconds(slower, **layout) >= seconds(NODE, **layout) * (1 - 1e-9)


@given(
    sync=st.sampled_from(("every", "last", "reduce_scatter_only")),
    number=st.integers(1, 5),
    reshard=st.sampled_from(("always", "never")),
    replicas=st.sampled_from((1, 2)),
    size=st.integers(1, 4),
    ranks=st.sampled_from((1, 2, 8)),
)
def test_offload_is_never_faster(
    sync: str, number: int, reshard: str, replicas: int, size: int, ranks: int
) -> None:
    layout = {
        "gradient_sync": sync,
        "num_microbatches": number,
        "reshard_after_forward": reshard,
        "dp_replicate": replicas,
        "dp_shard": ranks,
        "micro_batch": size,
    }
    assert case(offload="cpu", **layout).seconds >= case(**layout).seconds


def test_each_further_micro_batch_that_reduces_waits_for_its_additions() -> None:
    def waiting(number: int, sync: str = "every") -> float:
        layout = {"num_microbatches": number, "gradient_sync": sync, "micro_batch": 4}
        return case(dp_shard=8, offload="cpu", **layout).estimate.time.host_seconds

    once, twice, thrice = (waiting(number) for number in (1, 2, 3))
    model = case().model
    elements = stage_shard_elements(model=model, stage=whole_model(model), tp=1, shard_ranks=8)
    assert twice - once > 0.9 * adding_seconds(elements, NODE)
    assert thrice - twice == pytest.approx(twice - once, rel=0.2)
    # what is reduced once is never added to
    assert waiting(3, "last") < 0.2 * twice


def test_the_optimizer_runs_by_the_hosts_memory() -> None:
    here, there = (case(dp_shard=8, offload=where).estimate.time for where in ("none", "cpu"))
    device = case().cluster.device
    on_device = device.fit.memory_fraction * device.memory_bandwidth_bytes_per_second
    ratio = there.optimizer_seconds / here.optimizer_seconds
    # launches of kernels bound the smaller one
    assert 1 < ratio <= on_device / host_bytes_per_second(NODE) * 1.01
    assert here.host_seconds == 0
