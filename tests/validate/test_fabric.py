"""Every GPU that tables name has a profile that can be loaded, and it is the GPU's."""

from __future__ import annotations

import pytest

from fsdpplan.validate.fabric import NODES, PAIRS, ClusterRequest, load_request


@pytest.mark.parametrize(("gpu", "profile"), sorted(NODES.items()))
def test_a_named_gpu_has_a_cluster_of_it(gpu: str, profile: str) -> None:
    cluster = load_request(ClusterRequest(profile=profile, gpus=64, gpus_per_node=8))
    family = gpu.split("-")[0].lower()
    assert cluster.device.name.startswith(family)
    assert cluster.nodes == 8


def test_a_pair_is_one_node() -> None:
    for profile in PAIRS.values():
        assert load_request(ClusterRequest(profile=profile, gpus=2, gpus_per_node=2)).nodes == 1


def test_ports_replace_the_profiles_network_and_nothing_else() -> None:
    plain = ClusterRequest(profile="dgx-a100-80g-hdr", gpus=16, gpus_per_node=8)
    other = ClusterRequest(
        profile="dgx-a100-80g-hdr",
        gpus=16,
        gpus_per_node=8,
        ports=4,
        port_bandwidth_bytes_per_second=12.5e9,
    )
    inside, outside = load_request(other).levels
    assert inside == load_request(plain).levels[0]
    assert (outside.ports, outside.port_bandwidth_bytes_per_second) == (4, 12.5e9)
    assert outside.latency_seconds == load_request(plain).levels[1].latency_seconds
