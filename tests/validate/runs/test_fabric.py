"""Every GPU and network that tables name has a profile that can be loaded, and it is the GPU's."""

from __future__ import annotations

import pytest

from fsdpplan.files.profiles.catalogue import load_device, load_node, profile_names
from fsdpplan.validate.runs.fabric import (
    NETWORKS,
    SPECIAL_NODES,
    ClusterRequest,
    cluster_request,
    load_request,
    named,
    names_network,
    request_for,
    usual_networks,
    usual_node,
)
from fsdpplan.validate.runs.network_words import ports_of
from fsdpplan.validate.runs.skipped import NotExpressed
from tests.validate.tables import run

NAMED = {
    profile.table_name: profile
    for profile in map(load_device, profile_names("device"))
    if profile.table_name is not None
}
"""Devices that tables of runs name."""


@pytest.mark.parametrize("gpu", sorted(NAMED))
def test_a_named_gpu_has_a_cluster_of_it(gpu: str) -> None:
    assert named(gpu) == NAMED[gpu]
    profile = usual_node(gpu)
    node = load_node(profile)
    assert node.device == NAMED[gpu].device.name
    per_node = node.gpus_per_node or 8
    gpus = 8 * per_node if len(node.levels) > 1 else per_node
    cluster = load_request(ClusterRequest(profile=profile, gpus=gpus, gpus_per_node=per_node))
    family = gpu.split("-")[0].lower()
    assert cluster.device.name.replace("rtx-", "rtx").startswith(family)


@pytest.mark.parametrize(("gpu", "pattern", "profile"), NETWORKS)
def test_a_named_network_is_around_the_same_gpu(gpu: str, pattern: object, profile: str) -> None:
    plain = load_request(ClusterRequest(profile=usual_node(gpu), gpus=64, gpus_per_node=8))
    named = load_request(ClusterRequest(profile=profile, gpus=64, gpus_per_node=8))
    assert named.device == plain.device
    assert named.levels[-1].domain_gpus == 64


@pytest.mark.parametrize(
    ("words", "gpu"),
    [
        ("V100", "V100-32GB"),
        ("A100", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("H100", "H100-80GB"),
        ("H100 96GB 500W", "H100-96GB-HBM2e-500W"),
        ("RTX 4090", "RTX4090-24GB"),
        ("GB200", "GB200-186GB"),
    ],
)
def test_a_gpu_is_known_by_its_family_and_memory(words: str, gpu: str) -> None:
    assert request_for(words).profile == usual_node(gpu)


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
    assert request.profile == usual_node("V100-32GB")
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
        ("GB200", "gb200-nvl72"),
        ("NVIDIA GB300 NVL72", "gb300-nvl72"),
        ("B300", "dgx-b300"),
        ("AMD Instinct MI300X", "oci-bm-gpu-mi300x-8"),
        ("RTX 4090", "pcie-8xrtx4090"),
    ],
)
def test_a_gpu_is_known_by_the_names_that_tools_print(words: str, profile: str) -> None:
    request, said = cluster_request(run(gpu=words, gpus="8", gpus_per_node="8"))
    assert request.profile == profile
    assert any(words in sentence for sentence in said)


@pytest.mark.parametrize(
    "words",
    ["H100 PCIe 80GB", "H100 NVL 94GB", "A100-20GB", "RTX 3090", "MI325X", "GH200", "H1000"],
)
def test_another_part_of_the_same_name_is_not_taken_for_it(words: str) -> None:
    with pytest.raises(NotExpressed, match="no hardware profile"):
        cluster_request(run(gpu=words, gpus="8", gpus_per_node="8"))


@pytest.mark.parametrize(
    ("words", "ports", "gbits"),
    [
        ("4x100 Gb RoCE per node", 4, 100),
        ("1600 Gbps RoCE per node", 8, 200),
        ("400 Gb/s RDMA per GPU", 8, 400),
        ("4x Omni-Path links/node", 4, 100),
        ("NDR 400", None, 400),
        ("HDR InfiniBand", None, 200),
        ("8x NDR 400", 8, 400),
        ("1x 100 Gb/s management; compute: 8x NDR 400", 8, 400),
        ("2x200 Gb/s storage, 8x400 Gb/s compute", 8, 400),
        ("400 Gb/s InfiniBand per GPU + 200 Gb/s storage", 8, 400),
        ("3.2 Tb/s", 8, 400),
    ],
)
def test_the_ports_that_train_are_read_from_words(
    words: str, ports: int | None, gbits: float
) -> None:
    found = ports_of(words, 8)
    assert found is not None
    assert (found.ports, found.gbits) == (ports, gbits)


@pytest.mark.parametrize("words", ["", "InfiniBand", "AWS EFA", "1x 100 Gb"])
def test_words_without_a_rate_of_all_ports_leave_the_network_open(words: str) -> None:
    named = names_network(run(inter_net_note=words))
    assert named is (words in ("AWS EFA", "1x 100 Gb"))


def test_a_rack_is_many_nodes_and_its_ports_are_those_of_all() -> None:
    request, said = cluster_request(
        run(gpu="GB200", gpus="144", gpus_per_node="72", inter_net_note="4x400 Gb per node")
    )
    assert request.gpus_per_node == 4
    assert any("nodes of 4" in sentence for sentence in said)
    assert load_request(request).levels[-1].ports == 4 * 18


def test_rows_fill_one_rack_after_another() -> None:
    """No row says that its nodes were asked for in shares of racks."""
    request, _ = cluster_request(run(gpu="GB200", gpus="512", gpus_per_node="4"))
    nvlink, network = load_request(request).levels
    assert (nvlink.domain_gpus, nvlink.whole_gpus, network.ports) == (72, None, 4 * 18)


def test_usual_networks_are_those_of_nodes_with_the_gpu() -> None:
    assert "8x400 Gb" in usual_networks("dgx-h100")
    assert usual_networks("gb200-nvl72") == ("4x400 Gb",)
