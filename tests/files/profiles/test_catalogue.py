"""Profiles: every number has a source, generations stand in their known ratios, and a file that
someone wrote wrongly is one line that names the field."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import (
    LIMIT_BYTES,
    load_device,
    load_profile,
    parse_profile,
    profile_for_gpus,
    profile_names,
    profile_text,
    profiles_folder,
    read_profile,
)
from fsdpplan.files.profiles.devices import DEVICE_LOAN, NO_NUMBERS, DeviceProfile, PhysicsProfile
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.spec.cluster import Device, Level, StepError
from tests.refusals import check_one_line

GPUS = ("a100-sxm-40g", "a100-sxm-80g", "h100-sxm-80g", "h200-sxm-141g", "b200-sxm-180g")


def device(name: str) -> Device:
    return load_device(name).device


def gpus_of(name: str, *, nodes: int) -> int:
    """GPUs of that many whole nodes; two a node where a node has no size of its own."""
    node = load_profile(name)
    assert isinstance(node, NodeProfile)
    return nodes * (node.gpus_per_node or 2)


def reaches_others(name: str) -> bool:
    node = load_profile(name)
    return isinstance(node, NodeProfile) and node.levels[-1].joins == "cluster"


def levels(node: str) -> dict[str, Level]:
    return {level.name: level for level in load_cluster(node, gpus=64).cluster.levels}


# --- what the catalogue holds -------------------------------------------------------------------


def test_the_promised_hardware_is_there() -> None:
    assert set(GPUS) <= set(profile_names("device"))
    assert {
        "dgx-a100-80g-hdr",
        "dgx-a100-80g-hdr1",
        "dgx-h100",
        "dgx-h200",
        "dgx-b200",
        "lambda-2xh100",
        "cpu",
    } <= set(profile_names("node"))


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_is_named_as_its_file_and_gives_each_source_a_use(name: str) -> None:
    raw = tomllib.loads(profile_text(name))
    assert raw["name"] == name
    used = set(re.findall(r'source = "([^"]+)"', profile_text(name)))
    assert used == set(raw["sources"]), "a source that nothing uses, or the reverse"


@pytest.mark.parametrize("name", profile_names("node"))
def test_every_number_of_a_cluster_has_a_source(name: str) -> None:
    loaded = load_cluster(name, gpus=gpus_of(name, nodes=8 if reaches_others(name) else 1))
    sources = dict(loaded.sources)
    cluster = loaded.cluster
    numbers = [f"cluster.device.{field}" for field in set(Device.__dataclass_fields__) - NO_NUMBERS]
    for field in numbers:
        if getattr(cluster.device, field.rsplit(".", 1)[1]) is not None:
            assert sources[field].strip()
    for field in StepError.__dataclass_fields__:
        assert sources[f"cluster.device.error.{field}"].strip()
    for level in cluster.levels:
        for field in ("ports", "port_bandwidth_bytes_per_second", "latency_seconds", "gpudirect"):
            assert sources[f"cluster.levels.{level.name}.{field}"].strip()
    assert "cluster.gpus" in sources


@pytest.mark.parametrize(
    ("newer", "older", "field", "ratio"),
    [
        ("h100-sxm-80g", "a100-sxm-80g", "peak_bf16_flops_per_second", 3.17),
        ("h100-sxm-80g", "a100-sxm-80g", "peak_fp32_flops_per_second", 3.43),
        ("h100-sxm-80g", "a100-sxm-80g", "memory_bandwidth_bytes_per_second", 1.64),
        ("h100-sxm-80g", "a100-sxm-80g", "multiprocessors", 132 / 108),
        ("h100-sxm-80g", "a100-sxm-80g", "host_link_bytes_per_second", 2.0),
        ("h200-sxm-141g", "h100-sxm-80g", "peak_bf16_flops_per_second", 1.0),
        ("h200-sxm-141g", "h100-sxm-80g", "memory_bandwidth_bytes_per_second", 1.43),
        ("h200-sxm-141g", "h100-sxm-80g", "memory_bytes", 1.77),
        ("b200-sxm-180g", "h100-sxm-80g", "peak_bf16_flops_per_second", 2.27),
        ("b200-sxm-180g", "h100-sxm-80g", "peak_fp8_flops_per_second", 2.27),
        ("b200-sxm-180g", "h100-sxm-80g", "memory_bandwidth_bytes_per_second", 2.39),
        ("b200-sxm-180g", "h200-sxm-141g", "memory_bytes", 1.276),
        ("a100-sxm-80g", "a100-sxm-40g", "memory_bytes", 2.0),
        ("a100-sxm-80g", "a100-sxm-40g", "memory_bandwidth_bytes_per_second", 1.31),
        ("a100-sxm-80g", "a100-sxm-40g", "peak_bf16_flops_per_second", 1.0),
    ],
)
def test_generations_stand_in_their_published_ratios(
    newer: str, older: str, field: str, ratio: float
) -> None:
    assert getattr(device(newer), field) / getattr(device(older), field) == pytest.approx(
        ratio, rel=0.01
    )


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_dense_and_memory_is_what_torch_reports(name: str) -> None:
    gpu = device(name)
    assert gpu.peak_fp16_flops_per_second == gpu.peak_bf16_flops_per_second
    if gpu.peak_fp8_flops_per_second is not None:
        assert gpu.peak_fp8_flops_per_second / gpu.peak_bf16_flops_per_second == pytest.approx(
            2, rel=0.001
        )
    advertised = int(re.findall(r"(\d+)g$", name)[0])
    # HBM is sold in GiB-like stacks but torch sees less of it; never more than 1.08 x the name
    assert 0.98 < gpu.memory_bytes / (advertised * 1e9) < 1.08
    per_multiprocessor = gpu.peak_bf16_flops_per_second / gpu.multiprocessors
    assert 2e12 < per_multiprocessor < 20e12


def test_links_are_one_direction_and_per_gpu_or_port() -> None:
    a100, h100, b200 = (levels(n) for n in ("dgx-a100-80g-hdr", "dgx-h100", "dgx-b200"))
    rate = "port_bandwidth_bytes_per_second"
    assert getattr(a100["nvlink"], rate) == 600e9 / 2
    assert getattr(h100["nvlink"], rate) / getattr(a100["nvlink"], rate) == 900 / 600
    assert getattr(b200["nvlink"], rate) / getattr(h100["nvlink"], rate) == 2
    assert getattr(h100["infiniband"], rate) / getattr(a100["infiniband"], rate) == 2
    assert getattr(a100["infiniband"], rate) == 200e9 / 8


def test_the_hdr1_cluster_has_one_port_a_node() -> None:
    each, shared = levels("dgx-a100-80g-hdr"), levels("dgx-a100-80g-hdr1")
    assert (each["infiniband"].ports, shared["infiniband"].ports) == (8, 1)
    assert each["nvlink"] == shared["nvlink"]


# --- clusters from profiles and flags -----------------------------------------------------------


def test_a_whole_node_is_the_default_and_has_no_network() -> None:
    cluster = load_cluster("dgx-h100").cluster
    assert (cluster.gpus, cluster.gpus_per_node, len(cluster.levels)) == (8, 8, 1)


def test_fewer_gpus_than_a_node_use_a_part_of_one() -> None:
    cluster = load_cluster("dgx-h100", gpus=3).cluster
    assert (cluster.nodes, cluster.gpus_per_node, cluster.levels[0].domain_gpus) == (1, 3, 3)


def test_half_nodes_drive_half_of_the_ports_but_at_least_one() -> None:
    half = load_cluster("dgx-h100", gpus=16, gpus_per_node=4).cluster
    assert (half.nodes, half.levels[1].ports) == (4, 4)
    shared = load_cluster("dgx-a100-80g-hdr1", gpus=16, gpus_per_node=4).cluster
    assert shared.levels[1].ports == 1


def test_cpu_processes_stand_on_as_many_nodes_as_asked() -> None:
    assert load_cluster("cpu", gpus=4).cluster.nodes == 1
    two = load_cluster("cpu", gpus=4, gpus_per_node=2).cluster
    assert (two.nodes, two.device.kind, two.device.peak_fp8_flops_per_second) == (2, "cpu", None)


def test_flags_are_laid_over_the_profile_and_named_as_sources() -> None:
    loaded = load_cluster(
        "dgx-a100-80g-hdr1",
        gpus=16,
        device="a100-sxm-40g",
        intra_bandwidth_bytes_per_second=250e9,
        inter_bandwidth_bytes_per_second=12.5e9,
    )
    inside, between = loaded.cluster.levels
    assert (inside.ports, inside.port_bandwidth_bytes_per_second) == (1, 250e9)
    # per GPU: eight GPUs at 12.5 GB/s each
    assert (between.ports, between.port_bandwidth_bytes_per_second) == (8, 12.5e9)
    assert loaded.cluster.device.name == "a100-sxm-40g"
    sources = dict(loaded.sources)
    assert "--gpu" in sources["cluster.device"]
    assert "--inter-bw" in sources["cluster.levels.infiniband.ports"]
    assert "--intra-bw" in sources["cluster.levels.nvlink.port_bandwidth_bytes_per_second"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 20}, "use --gpus 16 or 24"),
        ({"gpus": 0}, "--gpus must lie between 1 and"),
        ({"gpus": -8}, "--gpus must lie between 1 and"),
        ({"gpus": 10**9}, "--gpus must lie between 1 and"),
        ({"gpus": 16, "gpus_per_node": 9}, "--gpus-per-node 8 or less"),
        ({"gpus": 16, "gpus_per_node": 0}, "--gpus-per-node must lie between 1 and"),
        ({"gpus": 4, "gpus_per_node": 8}, "--gpus-per-node must lie between 1 and"),
        ({"gpus": 8, "inter_bandwidth_bytes_per_second": 1e9}, "--inter-bw has no use"),
        ({"gpus": 1, "intra_bandwidth_bytes_per_second": 1e9}, "--intra-bw has no use"),
        ({"device": "dgx-h100"}, "not a device profile"),
        ({"device": "h100"}, "nearest: "),
    ],
)
def test_contradictory_flags_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        load_cluster("dgx-h100", **arguments)  # type: ignore[arg-type]


def test_a_node_without_a_network_stays_alone() -> None:
    with pytest.raises(SpecError, match="use --gpus 2"):
        load_cluster("lambda-2xh100", gpus=4)


@pytest.mark.parametrize("name", ["dgx-h10", "DGX-H100", "h10", "dxg-h100"])
def test_an_unknown_name_lists_the_nearest(name: str) -> None:
    with pytest.raises(ProfileNotFound, match=r"nearest: \S+"):
        load_cluster(name)


@pytest.mark.parametrize("name", ["hdr1", "HDR1", "superpod", "h100 azure", "2xh100", "p5", "p4d"])
def test_a_part_of_one_name_is_enough(name: str) -> None:
    assert all(part in load_cluster(name).cluster.name for part in name.lower().split())


def test_equal_nodes_share_what_does_not_fill_them() -> None:
    loaded = load_cluster("dgx-h100", gpus=14)
    assert (loaded.cluster.nodes, loaded.cluster.gpus_per_node) == (2, 7)
    assert loaded.leaves_idle
    assert not load_cluster("dgx-h100", gpus=16).leaves_idle


def test_a_file_of_the_name_is_pointed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mynode.toml").touch()
    with pytest.raises(ProfileNotFound, match=r"type mynode\.toml for the file here"):
        load_cluster("mynode")


@pytest.mark.parametrize("name", ["", "\0", "qqqqqq", "x" * 5000])
def test_nonsense_names_are_one_short_line(name: str) -> None:
    with pytest.raises(ProfileNotFound) as refusal:
        load_cluster(name)
    assert len(str(refusal.value)) < 300
    assert str(refusal.value).isprintable()


def test_a_device_is_not_a_node_and_its_nodes_are_named() -> None:
    with pytest.raises(SpecError, match=r"dgx-h100 or .*lambda-2xh100"):
        load_cluster("h100-sxm-80g", gpus=8)


@settings(deadline=None)
@given(st.integers(1, 40), st.sampled_from(profile_names("node")))
def test_any_number_of_whole_nodes_makes_a_cluster(nodes: int, name: str) -> None:
    nodes = nodes if reaches_others(name) else 1
    per_node = gpus_of(name, nodes=1)
    cluster = load_cluster(name, gpus=nodes * per_node, gpus_per_node=per_node).cluster
    assert cluster.nodes == nodes
    assert cluster.levels[-1].domain_gpus == cluster.gpus


# --- what profiles share and take over ----------------------------------------------------------


def test_cuda_devices_share_the_constants_of_physics_and_give_few() -> None:
    physics = load_profile("physics")
    assert isinstance(physics, PhysicsProfile)
    shared = dict(physics.fit)
    for name in profile_names("device"):
        gpu = device(name)
        own = set(tomllib.loads(profile_text(name)).get("fit", {}))
        if gpu.kind == "cuda":
            # fp8 alone does not make Hopper's attention kernels run
            assert own - set(DEVICE_LOAN) <= {"native_attention_ratio"}
            lent = own | set(DEVICE_LOAN)  # its own, or its relative's
            kept = {field: value for field, value in shared.items() if field not in lent}
            assert {field: getattr(gpu.fit, field) for field in kept} == kept


def test_a_relative_lends_its_fit_and_says_so() -> None:
    loaded = load_device("h200-sxm-141g")
    assert loaded.device.fit.matmul_fraction == device("h100-sxm-80g").fit.matmul_fraction
    source = dict(loaded.sources)["cluster.device.fit.matmul_fraction"]
    assert source.startswith("taken over from h100-sxm-80g: ")


def test_a_lower_power_limit_lowers_the_sustained_rate_as_its_cube_root() -> None:
    limited, whole = device("h100-sxm-96g-500w").fit, device("h100-sxm-80g").fit
    assert limited.sustained_fraction / whole.sustained_fraction == pytest.approx(
        (500 / 700) ** (1 / 3), rel=1e-4
    )
    assert limited.matmul_fraction == whole.matmul_fraction


def test_a_level_lends_its_fit_but_not_its_ports() -> None:
    a800, a100 = levels("hgx-a800-80g-4x100g")["nvlink"], levels("dgx-a100-80g-hdr")["nvlink"]
    assert a800.bandwidth_fraction == a100.bandwidth_fraction
    assert a800.port_bandwidth_bytes_per_second == pytest.approx(200e9)
    high, h100 = levels("gcp-a3-megagpu-8g")["nvlink"], levels("dgx-h100")["nvlink"]
    assert (high.multicast_fraction, high.base_seconds) == (0.0, h100.base_seconds)


def test_what_a_profile_gives_itself_goes_before_physics_and_relative() -> None:
    text = profile_text("h200-sxm-141g").replace(
        "[fit]", '[fit]\nkernel_launch_seconds = { value = 9e-06, source = "torch" }'
    )
    profile = parse_profile(text, where="mine.toml")
    assert isinstance(profile, DeviceProfile)
    assert profile.device.fit.kernel_launch_seconds == 9e-6


POWER = 'power_fraction = { value = 0.7, source = "torch" }'


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("h200-sxm-141g", '"h100-sxm-80g"', '"h200-sxm-141g"', "fitted_as must be the name of"),
        ("h200-sxm-141g", '"h100-sxm-80g"', '"b200-sxm-180g"', "with a fit of its own"),
        ("h200-sxm-141g", '"h100-sxm-80g"', '"dgx-h100"', "with a fit of its own"),
        ("h200-sxm-141g", '"h100-sxm-80g"', '"nothing"', "no hardware profile is called"),
        ("h200-sxm-141g", '"h100-sxm-80g"', '"../x"', "no hardware profile is called"),
        ("h200-sxm-141g", 'fitted_as = "h100-sxm-80g"', "", "fit.matmul_fraction is missing"),
        ("dgx-h200", '"dgx-h100:nvlink"', '"dgx-h100:shm"', 'fitted_as must be written "node'),
        ("dgx-h200", '"dgx-h100:nvlink"', '"dgx-h200:nvlink"', "borrows its numbers itself"),
        ("p4de-24xlarge", 'value = "none"', 'value = "most"', "low_latency.value must be one of"),
        ("physics", "fp8_fraction", "matmul_fraction", "unknown key 'fit.matmul_fraction'"),
        ("physics", '"matmul_fit" }', '"matmul_fit", of = 1 }', "unknown key"),
        ("h100-sxm-80g", "[numbers]", f"{POWER}\n[numbers]", "left out where there is no"),
    ],
)  # fmt: skip
def test_a_wrong_relative_is_one_line(name: str, old: str, new: str, message: str) -> None:
    text = profile_text(name)
    assert old in text
    with pytest.raises(SpecError) as refusal:
        parse_profile(text.replace(old, new, 1), where="mine.toml")
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


# --- detection ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "profile"),
    [
        (["NVIDIA H100 80GB HBM3"] * 8, "dgx-h100"),
        (["NVIDIA H100 80GB HBM3"] * 2, "lambda-2xh100"),
        (["NVIDIA A100-SXM4-80GB"] * 4, "dgx-a100-80g-hdr"),
        (["NVIDIA A100-SXM4-40GB"] * 8, "dgx-a100-40g-hdr"),
        (["NVIDIA H200"], "dgx-h200"),
        (["NVIDIA B200"] * 8, "dgx-b200"),
        (["NVIDIA H100 80GB HBM3"] * 9, None),
        (["NVIDIA H100 80GB HBM3", "NVIDIA H200"], None),
        (["NVIDIA GeForce RTX 4090"] * 2, "pcie-8xrtx4090"),
        (["NVIDIA GeForce GTX 1080"], None),
        ([], None),
    ],
)
def test_gpus_are_recognised_by_their_driver_names(names: list[str], profile: str | None) -> None:
    assert profile_for_gpus(names) == profile


# --- files that someone wrote -------------------------------------------------------------------


def test_a_profile_of_ones_own_is_a_path_and_finds_its_device_beside_it(tmp_path: Path) -> None:
    text = profile_text("h100-sxm-80g").replace("3.35e12", "2.0e12")
    (tmp_path / "ours.toml").write_text(text.replace('"h100-sxm-80g"', '"ours"'))
    node = profile_text("dgx-h100").replace('device = "h100-sxm-80g"', 'device = "ours"')
    (tmp_path / "node.toml").write_text(node)
    loaded = load_cluster(str(tmp_path / "node.toml"), gpus=16).cluster
    assert loaded.device.memory_bandwidth_bytes_per_second == 2.0e12


def test_a_cluster_profile_fixes_the_number_of_gpus(tmp_path: Path) -> None:
    (tmp_path / "big.toml").write_text(
        """
        schema_version = 1
        kind = "cluster"
        name = "big"
        description = "ours"
        node = "dgx-h100"
        gpus = { value = 128, source = "us" }
        [sources.us]
        what = "we counted them"
        """
    )
    loaded = load_cluster(str(tmp_path / "big.toml"))
    assert (loaded.cluster.name, loaded.cluster.gpus) == ("big", 128)
    assert dict(loaded.sources)["cluster.gpus"] == "we counted them"
    assert load_cluster(str(tmp_path / "big.toml"), gpus=16).cluster.gpus == 16


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{ value = 132, source", "{ value = 132.5, source", "multiprocessors.value must be"),
        ("{ value = 132, source", "{ value = true, source", "multiprocessors.value"),
        ("{ value = 132, source", "{ value = 0, source", "multiprocessors must be a whole number"),
        ("{ value = 132, source", "{ value = -1, source", "multiprocessors.value"),
        ('{ value = 132, source = "datasheet" }', "132", 'written { value = ..., source = "..." }'),
        ('132, source = "datasheet"', "132", "multiprocessors.source is missing"),
        ('132, source = "datasheet"', '132, source = "me"', "one of [sources]: datasheet"),
        ("3.35e12", "nan", "memory_bandwidth_bytes_per_second.value must be a finite number"),
        ("3.35e12", "inf", "must be a finite number"),
        ("3.35e12", "-1.0", "must be a finite number above 0"),
        ("3.35e12", '"fast"', "must be a number"),
        ("3.35e12", "1" * 5000, "thousands of digits"),
        ("multiprocessors =", "multiprocesors =", "unknown key 'numbers.multiprocesors'"),
        ('name = "h100-sxm-80g"', "", "name is missing"),
        ('name = "h100-sxm-80g"', 'name = "a\\nb"', "name must be one line"),
        ("schema_version = 1", "schema_version = 2", "schema_version must be 1"),
        ("schema_version = 1", "", "schema_version is missing"),
        ('kind = "device"', 'kind = "gpu"', "kind must be one of device, node, cluster"),
        ('torch_device = "cuda"', 'torch_device = "tpu"', "torch_device must be one of cuda, cpu"),
        ('evidence = "fitted"', 'evidence = "rumour"', "evidence must be one of"),
        ("[numbers]", "[numbers", "is not TOML"),
        ("[fit]", "[fits]", "unknown key 'fits'"),
        ("what = ", "who = ", "unknown key 'sources.datasheet.who'"),
        ("matmul_fraction = { value = 0", "matmul_fraction = { value = 7", "between 0 and 1"),
        ('nvml_names = ["NVIDIA H100 80GB HBM3"]', "nvml_names = 3", "nvml_names must be a list"),
        ('compute_capability = "9.0"', 'compute_capability = "sm_90"', "such as 9.0"),
        ('table_node = "dgx-h100"', "", "table_node"),
    ],
)  # fmt: skip
def test_a_wrong_device_file_is_one_line_with_the_field(old: str, new: str, message: str) -> None:
    text = profile_text("h100-sxm-80g")
    assert old in text
    with pytest.raises(SpecError) as refusal:
        parse_profile(text.replace(old, new, 1), where="mine.toml")
    assert str(refusal.value).startswith("mine.toml")
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('joins = "cluster"', 'joins = "node"', "levels must stand innermost first"),
        (
            'joins = "cluster"',
            'joins = "rack"',
            "joins must be one of node, domain, cluster",
        ),
        ("{ value = true,", "{ value = 1,", "gpudirect.value must be true or false"),
        ("ports = { value = 8,", "ports = { value = 0,", "levels[1].ports must be a whole"),
        ("gpus_per_node = {", "gpus_a_node = {", "unknown key 'gpus_a_node'"),
        ("[[levels]]", "[levels]", "is not TOML"),
    ],
)
def test_a_wrong_node_file_is_one_line_with_the_field(old: str, new: str, message: str) -> None:
    text = profile_text("dgx-h100")
    assert old in text
    with pytest.raises(SpecError) as refusal:
        parse_profile(text.replace(old, new, 1), where="mine.toml")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "not text"),
        (b"x = " + b"[" * 100_000, "TOML"),
        (b"#" * (LIMIT_BYTES + 1), "larger than 256 KiB"),
        (b"", "schema_version is missing"),
    ],
)
def test_a_hostile_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hostile.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message) as refusal:
        load_cluster(str(path))
    assert len(str(refusal.value)) < 500


def test_a_path_that_is_no_file_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path / "long" / ("x" * 300 + ".toml")):
        with pytest.raises(SpecError, match=r"does not exist|cannot be read"):
            load_cluster(str(path))
    with pytest.raises(SpecError, match="is not a file"):
        load_cluster(f"{tmp_path}/")


@given(st.data())
def test_a_cut_profile_never_passes_and_never_crashes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(profile_names()))
    text = profile_text(name)
    cut = data.draw(st.integers(0, len(text) - 2))
    whole = load_profile(name)
    try:
        profile = parse_profile(text[:cut], where="cut.toml")
    except SpecError as refusal:
        check_one_line(refusal)
    else:  # only the last line's comment or optional words can go
        assert isinstance(profile, DeviceProfile | NodeProfile | PhysicsProfile)
        assert {field for field, _ in profile.sources} == {field for field, _ in whole.sources}


def test_the_folder_is_found_from_a_checkout() -> None:
    assert read_profile(profiles_folder() / "dgx-h100.toml") == load_profile("dgx-h100")
