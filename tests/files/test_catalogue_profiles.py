"""What data sheets print stands in the profiles, halved where it must be; generations keep their
ratios; no device achieves more than its peak."""

from __future__ import annotations

import csv
import re
import tomllib
from itertools import chain
from statistics import median
from typing import Any

import pytest

from fsdpplan.cost.kernels.rates import achieved_rates
from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import group_placement
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import (
    load_device,
    load_profile,
    profile_names,
    profile_text,
    profiles_folder,
)
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.spec.cluster import Device

GIB = 2**30
DEVICES = [name for name in profile_names("device") if name != "cpu-process"]
BF16, FP8 = "peak_bf16_flops_per_second", "peak_fp8_flops_per_second"
FP16, FP32 = "peak_fp16_flops_per_second", "peak_fp32_flops_per_second"
MEMORY, BANDWIDTH = "memory_bytes", "memory_bandwidth_bytes_per_second"
SMS, HOST = "multiprocessors", "host_link_bytes_per_second"

GEFORCE = ("rtx-3090-24g", "rtx-4090-24g", "rtx-5090-32g")
GRAPHICS = ("a10-24g", "a40-48g", "l4-24g", "l40s-48g", "rtx-6000-ada-48g", "rtx-pro-6000-96g")
"""Chips of graphics cards that run fp32 accumulation at the full rate."""
AMD = ("mi250x-gcd-64g", "mi300x-192g", "mi325x-256g")


def device(name: str) -> Device:
    return load_device(name).device


def node(name: str) -> NodeProfile:
    profile = load_profile(name)
    assert isinstance(profile, NodeProfile)
    return profile


def entries(value: Any) -> list[dict[str, Any]]:
    """All `{ value, source }` tables below `value`."""
    if isinstance(value, list):
        return list(chain.from_iterable(map(entries, value)))
    if not isinstance(value, dict):
        return []
    if set(value) == {"value", "source"}:
        return [value]
    return list(chain.from_iterable(map(entries, value.values())))


# --- what is there ------------------------------------------------------------------------------


def test_the_catalogue_has_the_hardware_that_people_train_on() -> None:
    assert len(profile_names()) >= 80
    assert {"v100-sxm2-32g", "a10-24g", "a30-24g", "a40-48g", "a100-pcie-80g"} <= set(DEVICES)
    assert {"l4-24g", "l40s-48g", "rtx-3090-24g", "rtx-4090-24g", "rtx-5090-32g"} <= set(DEVICES)
    assert {"h100-pcie-80g", "h100-nvl-94g", "h20-96g", "gh200-96g", "gh200-144g"} <= set(DEVICES)
    assert {"b300-sxm-288g", "gb200-186g", "gb300-288g", "rtx-pro-6000-96g"} <= set(DEVICES)
    assert set(AMD) < set(DEVICES)
    nodes = set(profile_names("node"))
    assert {"gb200-nvl72", "gb300-nvl72", "dgx-b300", "coreweave-hgx-h100"} < nodes
    assert {"p5en-48xlarge", "p6-b200-48xlarge", "gcp-a3-ultragpu-8g", "gcp-a4-highgpu-8g"} < nodes
    assert {"azure-nd-a100-v4", "azure-nd-h100-v5", "azure-nd-h200-v5"} < nodes
    assert {"oci-bm-gpu4-8", "oci-bm-gpu-h100-8", "pcie-8xl40s", "pcie-8xrtx4090"} < nodes


@pytest.mark.parametrize("name", profile_names())
def test_every_number_names_a_source_that_says_something(name: str) -> None:
    raw = tomllib.loads(profile_text(name))
    numbers = entries({key: value for key, value in raw.items() if key != "sources"})
    assert numbers
    for number in numbers:
        assert len(raw["sources"][number["source"]]["what"].strip()) >= 6
    for source in raw["sources"].values():
        assert source.get("url", "https://").startswith("https://")


def test_no_two_devices_answer_to_the_same_name_of_the_driver() -> None:
    known = [name for profile in DEVICES for name in load_device(profile).nvml_names]
    assert len(known) == len(set(known))
    nameless = {profile for profile in DEVICES if not load_device(profile).nvml_names}
    # the one to order calls itself plainly H100; AMD's are not asked through NVML
    assert nameless == {"h100-sxm-96g-500w", *AMD}


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_of_nvidias_says_its_architecture(name: str) -> None:
    device = load_device(name).device
    is_nvidia = device.kind == "cuda" and device.vendor == "nvidia"
    assert (device.compute_capability is not None) == is_nvidia
    if is_nvidia and device.peak_fp8_flops_per_second is not None:
        major, minor = map(int, str(device.compute_capability).split("."))
        assert (major, minor) >= (8, 9)  # Ada has the first 8-bit tensor cores


@pytest.mark.parametrize("name", [*AMD, "azure-nd-mi300x-v5", "oci-bm-gpu-mi300x-8"])
def test_hardware_that_is_only_declared_says_so_with_every_number(name: str) -> None:
    raw = tomllib.loads(profile_text(name))
    own = {key: source for key, source in raw["sources"].items() if not key.startswith("nccl")}
    assert all(source["what"].startswith("declared") for source in own.values())
    assert any("nothing here ran on it" in source["what"] for source in own.values())
    assert profile_text(name).startswith("# Declared")


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
def test_torch_reports_nine_tenths_of_the_boards_memory_or_more(name: str) -> None:
    match = re.search(r"-(\d+)g\b", name)
    assert match is not None
    assert 0.9 <= device(name).memory_bytes / (int(match[1]) * GIB) <= 1


@pytest.mark.parametrize("name", DEVICES)
def test_no_device_achieves_more_than_its_peak(name: str) -> None:
    gpu = device(name)
    for rate in achieved_rates(gpu):
        assert 0 < rate.in_step <= rate.alone <= rate.peak, rate.what
    assert achieved_rates(gpu)[0].peak == gpu.peak_bf16_flops_per_second


@pytest.mark.parametrize(
    ("name", "sparse_teraflops"),
    [
        ("a10-24g", 250),
        ("a30-24g", 330),
        ("a40-48g", 299.4),
        ("a100-pcie-40g", 624),
        ("a100-pcie-80g", 624),
        ("a100-sxm-80g", 624),
        ("l4-24g", 242),
        ("l40s-48g", 733),
        ("rtx-6000-ada-48g", 1457 / 2),
        ("h100-pcie-80g", 1513),
        ("h100-sxm-80g", 1979),
        ("h200-sxm-141g", 1979),
        ("gh200-96g", 1979),
        ("b200-sxm-180g", 4500),
        ("b300-sxm-288g", 4500),
        ("gb200-186g", 5000),
        ("gb300-288g", 5000),
    ],
)
def test_rates_are_half_of_what_is_printed_with_sparsity(
    name: str, sparse_teraflops: float
) -> None:
    # the L40S sheet itself prints 362.05 beside 733
    assert device(name).peak_bf16_flops_per_second == pytest.approx(
        sparse_teraflops * 1e12 / 2, rel=0.0125
    )


@pytest.mark.parametrize("name", DEVICES)
def test_fp8_is_twice_bf16_where_there_is_fp8(name: str) -> None:
    gpu = device(name)
    has_fp8 = name.startswith(("h", "b", "g", "l4", "rtx-4", "rtx-5", "rtx-6", "rtx-p", "mi3"))
    assert (gpu.peak_fp8_flops_per_second is not None) is has_fp8
    if gpu.peak_fp8_flops_per_second is not None:
        assert gpu.peak_fp8_flops_per_second / gpu.peak_bf16_flops_per_second == pytest.approx(
            2, rel=0.0125
        )


@pytest.mark.parametrize(("names", "ratio"), [(GEFORCE, 2), (GRAPHICS, 4)])
def test_geforce_accumulates_in_fp32_at_half_the_rate_of_its_siblings(
    names: tuple[str, ...], ratio: int
) -> None:
    for name in names:
        gpu = device(name)
        assert gpu.peak_bf16_flops_per_second == gpu.peak_fp16_flops_per_second
        assert gpu.peak_bf16_flops_per_second / gpu.peak_fp32_flops_per_second == pytest.approx(
            ratio, rel=0.013
        )


@pytest.mark.parametrize(
    ("one", "other", "field", "ratio"),
    [
        ("h200-sxm-141g", "h100-sxm-80g", BANDWIDTH, 4.8 / 3.35),
        ("b200-sxm-180g", "h100-sxm-80g", BF16, 2250 / 989.4),
        ("a100-pcie-80g", "a100-pcie-40g", BF16, 1),
        ("a100-pcie-80g", "a100-sxm-80g", BF16, 1),
        ("a100-pcie-80g", "a100-sxm-80g", BANDWIDTH, 1935 / 2039),
        ("a100-pcie-40g", "a100-sxm-40g", BANDWIDTH, 1),
        ("a30-24g", "a100-sxm-80g", SMS, 56 / 108),
        ("a30-24g", "a100-sxm-80g", BF16, 56 / 108 * 1440 / 1410),
        ("a40-48g", "rtx-3090-24g", SMS, 84 / 82),
        ("a40-48g", "rtx-3090-24g", BF16, 2.1),
        ("l40s-48g", "rtx-6000-ada-48g", SMS, 1),
        ("rtx-4090-24g", "rtx-3090-24g", FP32, 82.58 / 35.58),
        ("rtx-5090-32g", "rtx-4090-24g", BF16, 209.5 / 165.2),
        ("rtx-5090-32g", "rtx-4090-24g", BANDWIDTH, 1792 / 1008),
        ("rtx-5090-32g", "rtx-4090-24g", HOST, 2),
        ("rtx-pro-6000-96g", "rtx-5090-32g", SMS, 188 / 170),
        ("h100-pcie-80g", "h100-sxm-80g", SMS, 114 / 132),
        ("h100-pcie-80g", "h100-sxm-80g", BF16, 756.5 / 989.4),
        ("h100-nvl-94g", "h100-pcie-80g", BANDWIDTH, 3.9 / 2),
        ("gh200-96g", "h100-sxm-80g", FP8, 1),
        ("gh200-96g", "h100-sxm-80g", HOST, 450 / 64),
        ("gh200-144g", "gh200-96g", BANDWIDTH, 1.2),
        ("h20-96g", "h100-sxm-80g", BF16, 0.1496),
        ("h20-96g", "h800-sxm-80g", BANDWIDTH, 4 / 3.35),
        ("gb200-186g", "b200-sxm-180g", BF16, 2500 / 2250),
        ("gb200-186g", "b200-sxm-180g", SMS, 152 / 148),
        ("gb300-288g", "gb200-186g", BF16, 1),
        ("gb300-288g", "gb200-186g", MEMORY, 1.5),
        ("b300-sxm-288g", "b200-sxm-180g", MEMORY, 1.5),
        ("mi325x-256g", "mi300x-192g", BF16, 1),
        ("mi325x-256g", "mi300x-192g", MEMORY, 256 / 192),
        ("mi325x-256g", "mi300x-192g", BANDWIDTH, 6 / 5.3),
        ("mi300x-192g", "mi250x-gcd-64g", BF16, 1307.4 / 191.5),
        ("mi300x-192g", "h100-sxm-80g", BF16, 1.321),
        ("a10-24g", "a40-48g", SMS, 72 / 84),
        ("v100-sxm2-32g", "a100-sxm-80g", FP16, 125 / 312),
    ],
)
def test_devices_stand_in_their_published_ratios(
    one: str, other: str, field: str, ratio: float
) -> None:
    assert getattr(device(one), field) / getattr(device(other), field) == pytest.approx(
        ratio, rel=0.01
    )


@pytest.mark.parametrize(
    ("prefixes", "lowest", "highest"),
    [
        (("v100",), 0.005, 0.009),
        (("a100", "a800", "a30"), 0.0045, 0.007),
        (("a10-", "a40", "l4", "rtx-6", "rtx-p"), 0.002, 0.005),
        (GEFORCE, 0.006, 0.0135),
        (("h100", "h200", "h800", "gh200"), 0.0024, 0.0052),
        (("h20-",), 0.026, 0.028),
        (("b200", "b300", "gb"), 0.003, 0.0037),
        (("mi",), 0.004, 0.0085),
    ],
)
def test_memory_keeps_pace_with_compute_as_each_generation_has_it(
    prefixes: tuple[str, ...], lowest: float, highest: float
) -> None:
    """Bytes a second for each dense half-precision operation a second."""
    names = [name for name in DEVICES if name.startswith(prefixes)]
    assert names
    for name in names:
        gpu = device(name)
        share = gpu.memory_bandwidth_bytes_per_second / gpu.peak_fp16_flops_per_second
        assert lowest <= share <= highest, name


def test_every_device_is_of_a_generation_that_is_checked_here() -> None:
    checked = ("v100", "a10", "a8", "a30", "a40", "l4", "rtx", "h", "g", "b", "mi")
    assert all(name.startswith(checked) for name in DEVICES)


@pytest.mark.parametrize("name", DEVICES)
def test_the_host_link_is_one_direction_of_pcie_or_of_nvlink_c2c(name: str) -> None:
    with_grace = name.startswith("g")
    link = device(name).host_link_bytes_per_second
    assert link == 450e9 if with_grace else link in (16e9, 32e9, 64e9)


@pytest.mark.parametrize("name", DEVICES)
def test_a_datasheet_device_borrows_from_the_nearest_tensor_cores(name: str) -> None:
    profile = load_device(name)
    if profile.device.evidence == "datasheet":
        hopper_or_later = name.startswith(("h", "b", "g", "mi3"))
        relative = "h100-sxm-80g" if hopper_or_later else "a100-sxm-80g"
        assert profile.fitted_as == relative


# --- nodes and clusters -------------------------------------------------------------------------

NVLINK = {
    "v100": 6 * 25e9,
    "a100-sxm": 12 * 25e9,
    "a100-pcie": 12 * 25e9,
    "a800": 8 * 25e9,
    "h100": 18 * 25e9,
    "h200": 18 * 25e9,
    "h800": 8 * 25e9,
    "b200": 18 * 50e9,
    "b300": 18 * 50e9,
    "gb200": 18 * 50e9,
    "gb300": 18 * 50e9,
}
"""Links of a GPU times one direction of a link."""


@pytest.mark.parametrize("name", profile_names("node"))
def test_nvlink_is_one_direction_of_all_links_of_a_gpu(name: str) -> None:
    for profile in node(name).levels:
        level = profile.level
        if level.name == "nvlink":
            (links,) = (
                rate for prefix, rate in NVLINK.items() if node(name).device.startswith(prefix)
            )
            assert level.ports * level.port_bandwidth_bytes_per_second == links


@pytest.mark.parametrize("name", profile_names("node"))
def test_a_node_makes_clusters_of_one_two_and_four_nodes(name: str) -> None:
    per_node = node(name).gpus_per_node or 2
    alone = node(name).levels[-1].joins != "cluster"
    for nodes in (1,) if alone else (1, 2, 4):
        cluster = load_cluster(name, gpus=nodes * per_node, gpus_per_node=per_node).cluster
        assert (cluster.nodes, cluster.levels[-1].domain_gpus) == (nodes, nodes * per_node)


@pytest.mark.parametrize(
    ("name", "terabits"),
    [
        ("azure-nd-a100-v4", 1.6),
        ("azure-nd-h100-v5", 3.2),
        ("coreweave-hgx-h100", 3.2),
        ("gcp-a2-ultragpu-8g", 0.1),
        ("gcp-a3-ultragpu-8g", 3.2),
        ("gcp-a4-highgpu-8g", 3.2),
        ("oci-bm-gpu4-8", 1.6),
        ("oci-bm-gpu-a100-v2-8", 1.6),
        ("oci-bm-gpu-h100-8", 3.2),
        ("p4d-24xlarge", 0.4),
        ("p5-48xlarge", 3.2),
        ("p5en-48xlarge", 3.2),
        ("p6-b200-48xlarge", 3.2),
        ("p6-b300-48xlarge", 6.4),
        ("dgx-b300", 6.4),
        ("gb200-nvl72", 28.8),
    ],
)
def test_ports_add_up_to_what_the_provider_prints(name: str, terabits: float) -> None:
    """Of one node; of NVL72, whose ports are a rack's, of one rack."""
    level = node(name).levels[-1].level
    bytes_per_second = level.ports * level.port_bandwidth_bytes_per_second
    assert bytes_per_second * 8 == pytest.approx(terabits * 1e12)


@pytest.mark.parametrize("name", ["gb200-nvl72-rack", "gb300-nvl72-rack"])
def test_a_rack_of_nvl72_is_one_domain_of_eighteen_nodes(name: str) -> None:
    rack = load_cluster(name).cluster
    assert (rack.gpus, rack.nodes, len(rack.levels)) == (72, 18, 1)
    two = load_cluster(name, gpus=144).cluster
    assert [level.domain_gpus for level in two.levels] == [72, 144]
    assert two.levels[1].ports == 72


def test_bridged_pairs_meet_over_pcie() -> None:
    pairs, box = load_cluster("pcie-4xa100-80g-bridged").cluster.levels
    assert (pairs.domain_gpus, box.domain_gpus, box.ports) == (2, 4, 2)


def test_without_peer_to_peer_a_transfer_takes_half_of_the_host_link() -> None:
    direct, staged = (load_cluster(name).cluster for name in ("pcie-8xl40s", "pcie-8xrtx4090"))
    seconds = [
        collective_seconds(
            collective="all_gather",
            gathered_bytes=2**30,
            placement=group_placement(cluster=cluster, ranks=8, stride=1),
        )
        for cluster in (direct, staged)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(2, rel=0.05)


def test_two_gpus_on_pcie_gather_as_fast_as_two_l40s_were_measured() -> None:
    table = profiles_folder().parent / "tests" / "golden" / "bench" / "collectives.csv"
    cluster = load_cluster("pcie-8xl40s", gpus=2).cluster
    placement = group_placement(cluster=cluster, ranks=2, stride=1)
    errors = []
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            large = float(row["bytes"]) >= 2**20
            if (row["gpu"], row["gpus"], row["collective"]) == (
                "L40S",
                "2",
                "all_gather",
            ) and large:
                predicted = collective_seconds(
                    collective="all_gather",
                    gathered_bytes=float(row["bytes"]),
                    placement=placement,
                )
                errors.append(abs(predicted / (float(row["time_us"]) * 1e-6) - 1))
    assert len(errors) >= 8
    assert median(errors) < 0.05
