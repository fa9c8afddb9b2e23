from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from fsdpplan.errors import ProbeError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import load_node
from fsdpplan.files.profiles.detected import DetectedNode, node_of
from fsdpplan.files.profiles.levels import LEVEL_LOAN
from fsdpplan.spec.cluster import Cluster, Level
from fsdpplan.spec.machine import Gpu
from fsdpplan.spec.topology import FoundLevel
from tests.files.found_nodes import DATE, cluster, profile_of
from tests.refusals import check_one_line
from tests.topology.found import machine, with_gpus
from tests.topology.hosts import host, hosts
from tests.topology.recorded import FOLDER, NAMES

EXPECTED: dict[str, dict[str, Any]] = tomllib.loads(
    (FOLDER / "expected.toml").read_text(encoding="utf-8")
)
PLANNED = [name for name in NAMES if machine(name).gpus and name != "mig"]
"""Machines whose GPUs are whole and known."""


def level_words(level: Level, *, whole: bool) -> str:
    """As `expected.toml` has them."""
    size = "-" if whole else level.domain_gpus
    return f"{level.name} {size} {level.ports}x{level.port_bandwidth_bytes_per_second / 1e9:.3g}"


def found(
    *gpus: Gpu, levels: tuple[FoundLevel, ...] = (), nvlink_switch: bool = True
) -> DetectedNode:
    return DetectedNode(
        name="found",
        hosts="n01",
        gpus=gpus,
        levels=levels,
        nvlink_switch=nvlink_switch,
        network=None,
        weak=(),
        date=DATE,
    )


def nvlink(*, gpus: int) -> FoundLevel:
    return FoundLevel(
        kind="nvlink",
        domain_gpus=gpus,
        ports=1,
        port_bandwidth_bytes_per_second=450e9,
        healthy_bandwidth_bytes_per_second=450e9,
        gpudirect=True,
        evidence="NVLinks",
    )


@pytest.mark.parametrize("name", PLANNED)
def test_a_machine_is_planned_for_with_exactly_its_levels_ports_and_bandwidths(name: str) -> None:
    loaded = cluster(profile_of(machine(name)), nodes=2).cluster
    words = [level_words(level, whole=level is loaded.levels[-1]) for level in loaded.levels]
    assert words == EXPECTED[name]["levels"]


@pytest.mark.parametrize("name", PLANNED)
def test_every_number_of_a_level_says_where_it_is_from(name: str) -> None:
    profile = profile_of(machine(name))
    sources = dict(profile.sources)
    for level in profile.levels:
        prefix = f"cluster.levels.{level.level.name}."
        for field in ("ports", "port_bandwidth_bytes_per_second", "gpudirect"):
            assert (
                f"found on {machine(name).host.name} by fsdpplan detect" in sources[prefix + field]
            )
        for field in ("latency_seconds", "bandwidth_fraction", "half_bandwidth_bytes"):
            assert sources[prefix + field].startswith("taken over from ")


@pytest.mark.parametrize(
    ("name", "catalogued"), [("dgx-h100", "dgx-h100"), ("dgx-a100", "dgx-a100-80g-hdr")]
)
def test_a_machine_of_the_catalogue_is_found_as_the_catalogue_has_it(
    name: str, catalogued: str
) -> None:
    here = cluster(profile_of(machine(name)), nodes=4).cluster
    there = load_cluster(catalogued, gpus=32).cluster
    assert here.device == there.device
    assert (here.gpus_per_node, here.nodes) == (there.gpus_per_node, there.nodes)
    assert here.levels == there.levels


@pytest.mark.parametrize(
    ("name", "catalogued"), [("p5-efa", "p5-48xlarge"), ("a3-tcpx", "gcp-a3-highgpu-8g")]
)
def test_a_machine_of_a_cloud_resembles_its_profile(name: str, catalogued: str) -> None:
    def per_gpu(of: Cluster) -> float:
        return (
            of.levels[-1].ports * of.levels[-1].port_bandwidth_bytes_per_second / of.gpus_per_node
        )

    here = cluster(profile_of(machine(name)), nodes=2).cluster
    there = load_cluster(catalogued, gpus=16).cluster
    assert here.device == there.device
    assert here.levels[0] == there.levels[0]
    assert per_gpu(here) == pytest.approx(per_gpu(there))
    for field in LEVEL_LOAN:
        assert getattr(here.levels[-1], field) == getattr(there.levels[-1], field)


def test_a_rack_of_trays_resembles_the_catalogue_s_rack() -> None:
    here = profile_of(*hosts(18, "gb200-tray"))
    there = load_node("gb200-nvl72")
    assert (here.device, here.gpus_per_node) == (there.device, there.gpus_per_node)
    for own, theirs in zip(here.levels, there.levels, strict=True):
        assert (own.joins, own.domain_gpus) == (theirs.joins, theirs.domain_gpus)
        assert own.level == theirs.level


def test_one_tray_of_a_rack_is_planned_for_with_its_own_gpus_only() -> None:
    first, second = profile_of(host(1, "gb200-tray")).levels
    assert (first.joins, second.joins, second.level.ports) == ("node", "cluster", 4)


def test_one_gpu_has_a_level_that_nothing_crosses_and_a_network() -> None:
    whole = machine("dgx-h100")
    single = replace(whole, gpus=whole.gpus[:1], pairs=())
    loaded = cluster(profile_of(single), nodes=4).cluster
    assert [(each.name, each.domain_gpus, each.ports) for each in loaded.levels] == [
        ("none", 1, 1),
        ("infiniband", 4, 1),
    ]
    assert loaded.levels[0].latency_seconds == 0


def test_links_without_a_switch_cannot_reduce_on_the_way() -> None:
    gpus = machine("dgx-h100").gpus[:2]
    switched = node_of(found(*gpus, levels=(nvlink(gpus=2),)))
    direct = node_of(found(*gpus, levels=(nvlink(gpus=2),), nvlink_switch=False))
    assert switched.levels[0].level.multicast_fraction > 0
    assert direct.levels[0].level.multicast_fraction == 0
    assert "no switch" in dict(direct.sources)["cluster.levels.nvlink.multicast_fraction"]


def test_the_nearest_level_by_kind_lends_its_numbers_before_the_nearest_by_device() -> None:
    roce = dict(profile_of(machine("roce")).sources)["cluster.levels.roce.latency_seconds"]
    assert "oci-bm-gpu-h100-8:roce" in roce


def gpu(index: int, **changes: Any) -> Gpu:
    return replace(machine("dgx-h100").gpus[index], **changes)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (
            (gpu(0), gpu(1, name="NVIDIA H200")),
            "several kinds (NVIDIA H100 80GB HBM3, NVIDIA H200)",
        ),
        ((gpu(0, mig_enabled=True), gpu(1)), "GPU 0 of this machine is split by MIG"),
        ((gpu(0, name="NVIDIA GeForce 256"),), "1 x NVIDIA GeForce 256"),
        ((gpu(0, name='"'),), 'no profile has the GPUs of this machine (1 x ")'),
    ],
)
def test_gpus_that_cannot_be_planned_for_are_refused(gpus: tuple[Gpu, ...], said: str) -> None:
    with pytest.raises(ProbeError) as refusal:
        node_of(found(*gpus))
    check_one_line(refusal.value)
    assert said in str(refusal.value)
    assert "--hardware" in str(refusal.value)


def test_the_memory_that_a_board_has_does_not_change_its_device() -> None:
    less = with_gpus(machine("dgx-h100"), memory_bytes=None)
    assert profile_of(less).device == "h100-sxm-80g"
