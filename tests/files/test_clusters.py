"""Clusters from declared topologies: levels, oversubscription, several types of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.cost.network.placement import group_placement
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import load_node, parse_profile, profile_names, profile_text
from fsdpplan.files.profiles.devices import DeviceProfile
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.weak import weak_nodes, without_nodes

LEAF_SPINE = """
schema_version = 1
kind = "cluster"
name = "two-sites"
description = "two sites, leaf and spine at each"
node = "dgx-h100"
gpus = { value = 1024, source = "us" }

[[levels]]
name = "leaf"
joins = "domain"
domain_nodes = { value = 32, source = "us" }
fitted_as = "gcp-a3-megagpu-8g:fastrak"
ports = { value = 8, source = "us" }
port_bandwidth_bytes_per_second = { value = 50e9, source = "us" }
gpudirect = { value = true, source = "us" }

[[levels]]
name = "spine"
joins = "domain"
domain_nodes = { value = 64, source = "us" }
fitted_as = "gcp-a3-megagpu-8g:fastrak"
oversubscription = { value = 4, source = "us" }
gpudirect = { value = true, source = "us" }

[[levels]]
name = "wan"
joins = "cluster"
fitted_as = "gcp-a3-megagpu-8g:fastrak"
ports = { value = 1, source = "us" }
port_bandwidth_bytes_per_second = { value = 12.5e9, source = "us" }
latency_seconds = { value = 0.01, source = "us" }
gpudirect = { value = false, source = "us" }
low_latency = { value = "none", source = "us" }

[sources.us]
what = "our own records"
"""

MIXED = """
schema_version = 1
kind = "cluster"
name = "mixed"
description = "six new nodes and two old ones"

[[node_types]]
node = "dgx-h100"
num_nodes = { value = 6, source = "us" }

[[node_types]]
node = "dgx-a100-80g-hdr"
num_nodes = { value = 2, source = "us" }

[sources.us]
what = "our own records"
"""

WEAK = """
[[weak]]
nodes = ["n03"]
level = "infiniband"
remaining_fraction = { value = 0.25, source = "us" }
text = "mlx5_3 runs at 100 Gb/s, its equals at 400 Gb/s"
"""

NETWORK = """
[network]
transport = { value = "infiniband", source = "us" }
gpudirect = { value = "WAY", source = "us" }
"""

EQUAL = """
schema_version = 1
kind = "cluster"
name = "equal"
description = "eight nodes"
node = "dgx-h100"
gpus = { value = 64, source = "us" }

[sources.us]
what = "our own records"
"""

NVL72 = """
schema_version = 1
kind = "node"
name = "tray"
description = "trays of four GPUs, 18 of them on one NVLink"
device = "b200-sxm-180g"
gpus_per_node = { value = 4, source = "us" }

[[levels]]
name = "nvlink"
joins = "domain"
domain_gpus = { value = 72, source = "us" }
fitted_as = "dgx-h100:nvlink"
ports = { value = 1, source = "us" }
port_bandwidth_bytes_per_second = { value = 900e9, source = "us" }
gpudirect = { value = true, source = "us" }

[[levels]]
name = "infiniband"
joins = "cluster"
fitted_as = "gcp-a3-megagpu-8g:fastrak"
ports = { value = 72, source = "us" }
port_bandwidth_bytes_per_second = { value = 50e9, source = "us" }
gpudirect = { value = true, source = "us" }

[sources.us]
what = "our own records"
"""

BRIDGES = """
schema_version = 1
kind = "node"
name = "box"
description = "eight PCIe GPUs, bridged in pairs, on two sockets"
device = "a100-sxm-80g"
gpus_per_node = { value = 8, source = "us" }

[[levels]]
name = "nvlink"
joins = "domain"
domain_gpus = { value = 2, source = "us" }
fitted_as = "dgx-a100-80g-hdr:nvlink"
ports = { value = 1, source = "us" }
port_bandwidth_bytes_per_second = { value = 300e9, source = "us" }
gpudirect = { value = true, source = "us" }

[[levels]]
name = "pcie"
joins = "domain"
domain_gpus = { value = 4, source = "us" }
fitted_as = "dgx-a100-80g-hdr:nvlink"
ports = { value = 2, source = "us" }
port_bandwidth_bytes_per_second = { value = 31.5e9, source = "us" }
gpudirect = { value = true, source = "us" }

[[levels]]
name = "socket"
joins = "node"
fitted_as = "dgx-a100-80g-hdr:nvlink"
ports = { value = 1, source = "us" }
port_bandwidth_bytes_per_second = { value = 20e9, source = "us" }
gpudirect = { value = true, source = "us" }

[sources.us]
what = "our own records"
"""


def loaded(tmp_path: Path, text: str, gpus: int | None = None, **flags: int) -> Cluster:
    return load_cluster(written(tmp_path, text), gpus=gpus, **flags).cluster


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def shape(cluster: Cluster) -> list[tuple[str, int, int]]:
    return [(level.name, level.domain_gpus, level.ports) for level in cluster.levels]


@pytest.mark.parametrize(
    ("gpus", "levels"),
    [
        (1024, [("nvlink", 8, 1), ("leaf", 256, 8), ("spine", 512, 64), ("wan", 1024, 1)]),
        (512, [("nvlink", 8, 1), ("leaf", 256, 8), ("spine", 512, 64)]),
        (304, [("nvlink", 8, 1), ("leaf", 256, 8), ("spine", 304, 64)]),
        (256, [("nvlink", 8, 1), ("leaf", 256, 8)]),
        (8, [("nvlink", 8, 1)]),
    ],
)
def test_a_job_meets_the_levels_that_it_needs(
    gpus: int, levels: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    assert shape(loaded(tmp_path, LEAF_SPINE, gpus)) == levels


def test_oversubscription_is_shared_by_what_crosses_at_once(tmp_path: Path) -> None:
    """One ring over both leaves has all uplinks; 256 rings share them four to one."""
    cluster = loaded(tmp_path, LEAF_SPINE, 512)
    one_each = {"cluster": cluster, "ranks": 2, "stride": 256}
    assert group_placement(**one_each, groups_at_once=1).bandwidth_bytes_per_second == 50e9
    assert group_placement(**one_each).bandwidth_bytes_per_second == 12.5e9
    assert group_placement(cluster=cluster, ranks=512, stride=1).bandwidth_bytes_per_second == 400e9


def test_half_of_each_node_has_half_of_its_ports(tmp_path: Path) -> None:
    cluster = loaded(tmp_path, LEAF_SPINE, 256, gpus_per_node=4)
    assert shape(cluster) == [("nvlink", 4, 1), ("leaf", 128, 4), ("spine", 256, 32)]


def test_an_nvlink_domain_may_span_nodes(tmp_path: Path) -> None:
    assert shape(loaded(tmp_path, NVL72, 72)) == [("nvlink", 72, 1)]
    two = loaded(tmp_path, NVL72, 144)
    assert shape(two) == [("nvlink", 72, 1), ("infiniband", 144, 72)]
    assert two.nodes == 36
    assert group_placement(cluster=two, ranks=72, stride=1).bandwidth_bytes_per_second == 900e9
    assert group_placement(cluster=two, ranks=2, stride=72).bandwidth_bytes_per_second == 50e9


@pytest.mark.parametrize(
    ("gpus", "share", "segment"),
    [
        (16, 16, 4),
        (72, 72, 18),
        (96, 48, 12),
        (128, 64, 16),
        (144, 72, 18),
        (512, 64, 16),
        (1024, 64, 16),
        (544, 68, 17),
        (148, 72, None),
    ],
)
def test_a_job_takes_equal_shares_of_nvlink_domains(
    tmp_path: Path, gpus: int, share: int, segment: int | None
) -> None:
    racks = loaded(tmp_path, NVL72, gpus)
    inner = racks.levels[0]
    assert (inner.domain_gpus, racks.segment_nodes) == (share, segment)
    assert inner.whole_gpus == (72 if share < min(gpus, 72) else None)
    assert gpus == share or racks.levels[1].ports == share


def test_the_user_says_how_much_of_a_domain_is_used(tmp_path: Path) -> None:
    half = loaded(tmp_path, NVL72, 64, domain_gpus=32)
    assert shape(half) == [("nvlink", 32, 1), ("infiniband", 64, 32)]
    assert half.segment_nodes == 8
    assert half.levels[0].whole_gpus == 72
    whole = loaded(tmp_path, NVL72, 512, domain_gpus=72)
    assert (whole.levels[0].domain_gpus, whole.segment_nodes) == (72, None)
    for wrong, words in {
        66: "whole nodes of 4 GPUs, up to the 72",
        76: "whole nodes of 4 GPUs, up to the 72",
        48: "512 GPUs do not split into domains of 48: use --gpus 528",
    }.items():
        with pytest.raises(SpecError, match=words):
            loaded(tmp_path, NVL72, 512, domain_gpus=wrong)
    with pytest.raises(SpecError, match="NVLink that join nodes, and dgx-h100 has none"):
        load_cluster("dgx-h100", gpus=64, domain_gpus=8)


def test_a_profile_may_say_how_much_of_a_domain_jobs_get(tmp_path: Path) -> None:
    said = NVL72.replace(
        "domain_gpus =", 'usable_gpus = { value = 64, source = "us" }\ndomain_gpus ='
    )
    assert loaded(tmp_path, said, 64).levels[0].domain_gpus == 64
    racks = loaded(tmp_path, said, 576)
    assert (racks.levels[0].domain_gpus, racks.levels[0].whole_gpus) == (64, 72)
    for wrong in (
        said.replace('"nvlink"', '"ring"'),
        said.replace('joins = "domain"', "joins = 1"),
    ):
        with pytest.raises(SpecError):
            loaded(tmp_path, wrong, 128)


def test_leaves_above_nvlink_domains_have_as_many_of_them(tmp_path: Path) -> None:
    leaf = """
[[levels]]
name = "leaf"
joins = "domain"
domain_gpus = { value = 288, source = "us" }
fitted_as = "gcp-a3-megagpu-8g:fastrak"
ports = { value = 72, source = "us" }
port_bandwidth_bytes_per_second = { value = 50e9, source = "us" }
gpudirect = { value = true, source = "us" }
"""
    head, infiniband = NVL72.split('[[levels]]\nname = "infiniband"')
    text = (
        head
        + leaf.lstrip()
        + '\n[[levels]]\nname = "infiniband"'
        + infiniband.replace("value = 72", "value = 288")
    )
    assert shape(loaded(tmp_path, text, 1024)) == [
        ("nvlink", 64, 1),
        ("leaf", 256, 64),
        ("infiniband", 1024, 256),
    ]


def test_a_box_of_bridged_pairs_has_three_levels_in_a_node(tmp_path: Path) -> None:
    box = loaded(tmp_path, BRIDGES)
    assert shape(box) == [("nvlink", 2, 1), ("pcie", 4, 2), ("socket", 8, 1)]
    ring = {"cluster": box, "stride": 1}
    assert group_placement(**ring, ranks=2).bandwidth_bytes_per_second == 300e9
    assert group_placement(**ring, ranks=4).bandwidth_bytes_per_second == 63e9
    assert group_placement(**ring, ranks=8).bandwidth_bytes_per_second == 20e9
    assert shape(loaded(tmp_path, BRIDGES, 2)) == [("nvlink", 2, 1)]
    with pytest.raises(SpecError, match="no network to others: use --gpus 8"):
        loaded(tmp_path, BRIDGES, 16)


def test_of_two_types_of_nodes_the_slowest_sets_each_part(tmp_path: Path) -> None:
    result = load_cluster(written(tmp_path, MIXED))
    new, old = (load_cluster(name, gpus=64).cluster for name in ("dgx-h100", "dgx-a100-80g-hdr"))
    mixed = result.cluster
    assert (mixed.gpus, mixed.nodes) == (64, 8)
    peak = mixed.device.peak_bf16_flops_per_second
    assert peak == old.device.peak_bf16_flops_per_second
    assert mixed.device.memory_bytes == min(new.device.memory_bytes, old.device.memory_bytes)
    assert mixed.device.peak_fp8_flops_per_second is None
    assert (mixed.device.compute_capability, mixed.device.skypilot_name) == ("8.0", None)
    assert [level.port_bandwidth_bytes_per_second for level in mixed.levels] == [300e9, 25e9]
    assert [part.gpus for part in result.parts] == [48, 16]
    assert result.warnings[0].startswith("2 of 8 nodes are dgx-a100-80g-hdr: every step waits")
    with pytest.raises(SpecError, match="leave out --gpus"):
        load_cluster(written(tmp_path, MIXED), gpus=32)


def test_a_weak_spot_slows_its_level_and_is_said(tmp_path: Path) -> None:
    result = load_cluster(written(tmp_path, EQUAL + WEAK))
    assert result.cluster.levels[1].port_bandwidth_bytes_per_second == 12.5e9
    assert result.warnings == ("n03: mlx5_3 runs at 100 Gb/s, its equals at 400 Gb/s",)
    alone = load_cluster(written(tmp_path, EQUAL + WEAK), gpus=8)
    assert alone.cluster.weak == ()  # one node does not meet the network
    assert alone.warnings == ()


@pytest.mark.parametrize(("way", "agrees"), [("peermem", True), ("dmabuf", True), ("none", False)])
def test_one_file_has_one_word_on_gpudirect(tmp_path: Path, way: str, agrees: bool) -> None:
    """The level's word is priced; another one of the network would be seen by nobody."""
    text = EQUAL + NETWORK.replace("WAY", way)
    assert load_cluster(written(tmp_path, text), gpus=8).cluster.network is None
    if agrees:
        assert load_cluster(written(tmp_path, text)).cluster.gpudirect is True
        return
    with pytest.raises(SpecError, match="gpudirect none, and level infiniband says gpudirect = tr"):
        load_cluster(written(tmp_path, text))


def test_weak_nodes_may_be_named_as_slurm_does(tmp_path: Path) -> None:
    text = (EQUAL + WEAK).replace('["n03"]', '["n[02-03]", "m1"]')
    assert weak_nodes(load_cluster(written(tmp_path, text)).cluster) == ("n02", "n03", "m1")


def test_a_bandwidth_by_flag_is_that_of_a_healthy_node(tmp_path: Path) -> None:
    """The weak node has its share of it, and without the node all of it is there."""
    weak = load_cluster(
        written(tmp_path, EQUAL + WEAK), inter_bandwidth_bytes_per_second=100e9
    ).cluster
    assert weak.levels[-1].port_bandwidth_bytes_per_second == pytest.approx(25e9)
    healthy = without_nodes(weak, ["n03"])
    assert healthy.levels[-1].port_bandwidth_bytes_per_second == pytest.approx(100e9)


def test_more_gpus_than_a_cluster_has_are_planned_but_said(tmp_path: Path) -> None:
    assert load_cluster(written(tmp_path, EQUAL), gpus=64).warnings == ()
    (said,) = load_cluster(written(tmp_path, EQUAL), gpus=72).warnings
    assert said == "equal has 64 GPUs: planned as if its outermost level joined more"


def mixed_weak(tmp_path: Path, *, node: str, left: float, names: bool = True) -> Cluster:
    """Six DGX H100 and two DGX A100 (a1, a2), one node of which has a slow port."""
    text = MIXED.replace(
        "[sources.us]", WEAK.replace("n03", node).replace("0.25", str(left)) + "\n[sources.us]"
    )
    if names:
        text = text.replace(
            "num_nodes = { value = 2,", 'names = ["a1", "a2"]\nnum_nodes = { value = 2,'
        )
        own = ", ".join(f'"h{n}"' for n in range(1, 7))
        text = text.replace(
            "num_nodes = { value = 6,", f"names = [{own}]\nnum_nodes = {{ value = 6,"
        )
    return load_cluster(written(tmp_path, text)).cluster


@pytest.mark.parametrize(("node", "left"), [("a1", 0.5), ("h1", 0.25), ("h1", 0.5), ("h1", 0.9)])
def test_a_weak_node_of_the_faster_type_waits_for_the_slower_one_anyway(
    node: str, left: float, tmp_path: Path
) -> None:
    cluster = mixed_weak(tmp_path, node=node, left=left)
    types = {"a1": "dgx-a100-80g-hdr", "h1": "dgx-h100"}
    reached = {  # ports of both types reach other shares of their rate
        host: load_cluster(name, gpus=16).cluster.levels[1].port_bandwidth_bytes_per_second
        * load_cluster(name, gpus=16).cluster.levels[1].bandwidth_fraction
        for host, name in types.items()
    }
    slowest = min(reached["a1"], reached["h1"], left * reached[node])
    level = cluster.levels[1]
    now = level.port_bandwidth_bytes_per_second * level.bandwidth_fraction
    assert now == pytest.approx(slowest, rel=1e-6)
    healed = without_nodes(cluster, [node])
    assert healed.levels[1].port_bandwidth_bytes_per_second == 25e9


def test_a_weak_node_of_unknown_type_is_taken_for_the_slowest(tmp_path: Path) -> None:
    cluster = mixed_weak(tmp_path, node="x1", left=0.5, names=False)
    assert cluster.levels[1].port_bandwidth_bytes_per_second == 12.5e9
    assert len(cluster.weak) == 1


def test_a_weak_node_that_no_type_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the weak spot of x1 is of none of its types"):
        mixed_weak(tmp_path, node="x1", left=0.5)


def test_a_weak_spot_of_a_level_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a weak spot names the level 'infinband'"):
        load_cluster(written(tmp_path, EQUAL + WEAK.replace("infiniband", "infinband")))


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (LEAF_SPINE, 'joins = "cluster"', 'joins = "node"', "the levels of a cluster join nodes"),
        (LEAF_SPINE, "value = 64,", "value = 16,", "levels must grow outwards"),
        (LEAF_SPINE, "value = 4,", "value = 0.5,", "must lie between 1 and 1000: ports below"),
        (LEAF_SPINE, 'fitted_as = "gcp-a3-megagpu-8g:fastrak"', "", "fitted_as is missing: name"),
        (
            LEAF_SPINE,
            "gcp-a3-megagpu-8g:fastrak",
            "dgx-h200:infiniband",
            "borrows its numbers itself",
        ),
        (LEAF_SPINE, ":fastrak", ":infiniband", 'such as "gcp-a3-megagpu-8g:fastrak"'),
        (LEAF_SPINE, 'joins = "domain"\n', 'joins = "cluster"\n', "must say how large one is"),
        (LEAF_SPINE, 'name = "spine"', 'name = "leaf"', "two levels are called leaf"),
        (LEAF_SPINE, 'gpus = { value = 1024, source = "us" }\n', "", "gpus is missing"),
        (LEAF_SPINE, 'node = "dgx-h100"', "", "a cluster must name its nodes once"),
        (MIXED, "dgx-a100-80g-hdr", "dgx-a100", "no hardware profile is called"),
        (MIXED, "dgx-a100-80g-hdr", "lambda-2xh100", "no network to others"),
        (MIXED, "num_nodes", "nodes", "unknown key 'node_types[0].nodes'"),
        (EQUAL + WEAK, '["n03"]', "[]", "needs the names of its nodes"),
        (EQUAL + WEAK, '["n03"]', '"n03"', "must be a list of names of nodes, not 'n03'"),
        (EQUAL + WEAK, '["n03"]', '["n 03; id"]', "'n 03; id' is no list of nodes"),
        (EQUAL + WEAK, "value = 0.25", "value = 2", "remaining_fraction must lie between 0 and 1"),
        (NVL72, 'joins = "domain"', 'joins = "node"', "must say how large one is"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(
    text: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in text
    with pytest.raises(SpecError) as refusal:
        loaded(tmp_path, text.replace(old, new, 1))
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_node_may_hold_its_device(tmp_path: Path) -> None:
    device = profile_text("h200-sxm-141g")
    profile = parse_profile(device, where="h200")
    assert isinstance(profile, DeviceProfile)
    node = profile_text("dgx-h200").replace(f'device = "{profile.device.name}"\n', "") + _as_table(
        device
    )
    path = tmp_path / "own.toml"
    path.write_text(node)
    own = load_cluster(str(path))
    named = load_cluster("dgx-h200")
    assert own.cluster.device == named.cluster.device
    read = parse_profile(node, where="own")
    assert isinstance(read, NodeProfile)
    assert read.own_device is not None
    assert read.own_device.device == profile.device


def _as_table(device: str) -> str:
    """A device profile's text as the table [device] of a node."""
    lines = ["", "[device]"]
    for line in device.splitlines():
        if line.startswith(("schema_version", "kind")):
            continue
        if line.startswith("[") and not line.startswith("[sources"):
            line = f"[device.{line[1:]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("gpus", "per_node"), [(8, 4), (7, 1), (16, None)])
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in profile_names("node")
        if not any(level.joins == "cluster" for level in load_node(name).levels)
        and load_node(name).device != "cpu"
        and (load_node(name).gpus_per_node or 0) == 8
    ],
)
def test_a_box_gets_the_network_that_is_said(name: str, gpus: int, per_node: int | None) -> None:
    gigabit = 1e9 / 8
    said = load_cluster(
        name, gpus=gpus, gpus_per_node=per_node, inter_bandwidth_bytes_per_second=10 * gigabit
    )
    outer, sockets = said.cluster.levels[-1], load_node("lan-1x4090").levels[-1].level
    assert (outer.domain_gpus, outer.gpudirect) == (gpus, False)
    assert outer.port_bandwidth_bytes_per_second == 10 * gigabit  # of each GPU
    assert outer.ports == said.cluster.gpus_per_node
    assert outer.bandwidth_fraction == sockets.bandwidth_fraction
    assert said.cluster.network is not None
    assert said.cluster.network.transport == "ethernet"
    assert any("over TCP" in warning for warning in said.warnings)
    assert f"cluster.levels.{outer.name}.port_bandwidth_bytes_per_second" in dict(said.sources)
    with pytest.raises(SpecError, match="--inter-bw 10Gb/s"):
        load_cluster(name, gpus=gpus, gpus_per_node=per_node)


def test_a_level_of_ethernet_that_says_no_more_is_tcp(tmp_path: Path) -> None:
    declared = """
schema_version = 1
kind = "cluster"
name = "lab"
description = "7 boxes on 2.5 Gb/s Ethernet"
node = "pcie-8xrtx4090"
gpus = { value = 56, source = "us" }

[[levels]]
name = "ethernet"
joins = "cluster"
ports = { value = 1, source = "us" }
port_bandwidth_bytes_per_second = { value = 312.5e6, source = "us" }
gpudirect = { value = false, source = "us" }

[sources.us]
what = "us"
"""
    lab = loaded(tmp_path, declared)
    assert lab.levels[-1].bandwidth_fraction == pytest.approx(0.64)
    with pytest.raises(SpecError, match="fitted_as is missing"):
        loaded(tmp_path, declared.replace('"ethernet"', '"fabric"'))
