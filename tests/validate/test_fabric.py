"""Every GPU and network that tables name has a profile that can be loaded, and it is the GPU's."""

from __future__ import annotations

import pytest

from fsdpplan.validate.fabric import (
    NETWORKS,
    NODES,
    SPECIAL_NODES,
    ClusterRequest,
    cluster_request,
    load_request,
)
from fsdpplan.validate.skipped import NotExpressed
from tests.validate.tables import run


@pytest.mark.parametrize(("gpu", "profile"), sorted(NODES.items()))
def test_a_named_gpu_has_a_cluster_of_it(gpu: str, profile: str) -> None:
    cluster = load_request(ClusterRequest(profile=profile, gpus=64, gpus_per_node=8))
    family = gpu.split("-")[0].lower()
    assert cluster.device.name.startswith(family)
    assert cluster.nodes == 8


@pytest.mark.parametrize(("gpu", "pattern", "profile"), NETWORKS)
def test_a_named_network_is_around_the_same_gpu(gpu: str, pattern: object, profile: str) -> None:
    plain = load_request(ClusterRequest(profile=NODES[gpu], gpus=64, gpus_per_node=8))
    named = load_request(ClusterRequest(profile=profile, gpus=64, gpus_per_node=8))
    assert named.device == plain.device
    assert named.levels[-1].domain_gpus == 64


def test_nodes_of_an_unusual_size_are_their_own() -> None:
    for (_, gpus), profile in SPECIAL_NODES.items():
        assert (
            load_request(ClusterRequest(profile=profile, gpus=gpus, gpus_per_node=gpus)).nodes == 1
        )


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


def test_a_gpu_that_the_notes_suggest_is_taken_and_said() -> None:
    row = run(gpu="", notes="GPU type NOT stated (its rate suggests V100 class)", gpus_per_node="8")
    request, said = cluster_request(row)
    assert request.profile == NODES["V100-32GB"]
    assert any("none is named" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("H100 SXM5", "dgx-h100"),
        ("NVIDIA A100-SXM4-40GB", "dgx-a100-40g-hdr"),
        ("a100", "dgx-a100-80g-hdr"),
        ("Tesla V100-SXM2-16GB", "dgx-1v-16g"),
        ("B200 192GB", "dgx-b200"),
        ("NVIDIA H200", "dgx-h200"),
    ],
)
def test_a_gpu_is_known_by_the_names_that_tools_print(words: str, profile: str) -> None:
    request, said = cluster_request(run(gpu=words, gpus="8", gpus_per_node="8"))
    assert request.profile == profile
    assert any(words in sentence for sentence in said)


@pytest.mark.parametrize(
    "words",
    ["H100 PCIe 80GB", "H100 NVL 94GB", "A100-20GB", "RTX 4090", "MI300X", "GB200", "H1000"],
)
def test_another_part_of_the_same_name_is_not_taken_for_it(words: str) -> None:
    with pytest.raises(NotExpressed, match="no hardware profile"):
        cluster_request(run(gpu=words, gpus="8", gpus_per_node="8"))
