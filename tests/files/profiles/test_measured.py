"""Measured profiles: the text says each number and how it was found, and is read back the same."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import parse_profile
from fsdpplan.files.profiles.devices import NO_NUMBERS
from fsdpplan.files.profiles.measured import NumberSource, ProfileHead, measured_profile_text
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.spec.cluster import Cluster, Device, DeviceFit, Level
from fsdpplan.spec.nodes import Network
from tests.cost.clusters import cluster

HEAD = ProfileHead(
    name="measured",
    description="8 GPUs",
    device_description="a GPU",
    nvml_names=("NVIDIA H100 80GB HBM3",),
    any_size=False,
)
TIMED = NumberSource(
    key="timed", what="kernels", how="12 rows", measured_on="n01", date="2026-11-22"
)


def text_of(whole: Cluster, sources: dict[str, NumberSource] | None = None) -> str:
    return measured_profile_text(cluster=whole, sources=sources or {}, head=HEAD)


def read_back(text: str, tmp_path: Path, *, gpus: int, per_node: int = 8) -> Cluster:
    path = tmp_path / "measured.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(str(path), gpus=gpus, gpus_per_node=per_node).cluster


@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-a100-80g-hdr", "dgx-b200", "p5-48xlarge"])
def test_all_numbers_come_back(profile: str, tmp_path: Path) -> None:
    whole = cluster(profile, gpus=32)
    found = read_back(text_of(whole), tmp_path, gpus=32)
    assert found.device == whole.device
    assert found.levels == whole.levels


@given(st.data())
def test_measured_numbers_come_back_to_the_last_digit(data: st.DataObject) -> None:
    whole = cluster(gpus=16)
    share, seconds = st.floats(0.01, 1.0), st.floats(1e-7, 1e-2)
    fit = replace(
        whole.device.fit,
        matmul_fraction=data.draw(share),
        attention_backward_ratio=data.draw(share),
        kernel_launch_seconds=data.draw(seconds),
    )
    level = replace(
        whole.levels[0],
        latency_seconds=data.draw(seconds),
        half_bandwidth_bytes=data.draw(st.floats(1.0, 1e10)),
        port_bandwidth_bytes_per_second=data.draw(st.floats(1e6, 1e12)),
    )
    device = replace(whole.device, fit=fit, evidence="measured")
    whole = replace(whole, device=device, levels=(level, whole.levels[1]))
    node = parse_profile(text_of(whole), where="measured.toml")
    assert isinstance(node, NodeProfile)
    assert node.own_device is not None
    assert node.own_device.device == device
    read = [replace(one.level, domain_gpus=1) for one in node.levels]
    assert read == [replace(one, domain_gpus=1) for one in whole.levels]


def test_a_number_says_how_it_was_measured_and_others_where_they_were() -> None:
    field = "cluster.device.fit.matmul_fraction"
    document = tomllib.loads(text_of(cluster(gpus=8), {field: TIMED}))
    assert document["device"]["fit"]["matmul_fraction"]["source"] == "timed"
    assert document["sources"]["timed"] == {
        "what": "kernels",
        "how": "12 rows",
        "measured_on": "n01",
        "date": "2026-11-22",
    }
    other = document["device"]["fit"]["memory_fraction"]["source"]
    assert document["sources"][other]["what"] == "as dgx-h100 has it"


def test_sources_of_one_name_that_differ_get_names_of_their_own() -> None:
    whole = cluster(gpus=8)
    sources = {
        "cluster.device.memory_bytes": TIMED,
        "cluster.device.multiprocessors": replace(TIMED, what="torch"),
        "cluster.device.fit.memory_fraction": TIMED,
    }
    document = tomllib.loads(text_of(whole, sources))
    numbers = document["device"]["numbers"]
    assert numbers["memory_bytes"]["source"] == "timed"
    assert numbers["multiprocessors"]["source"] == "timed_2"
    assert document["device"]["fit"]["memory_fraction"]["source"] == "timed"


def test_what_all_gpus_share_is_not_repeated_unless_it_was_measured() -> None:
    whole = cluster(gpus=8)
    fit = replace(whole.device.fit, kernel_launch_seconds=3e-6)
    document = tomllib.loads(text_of(replace(whole, device=replace(whole.device, fit=fit))))
    written = document["device"]["fit"]
    assert written["kernel_launch_seconds"]["value"] == 3e-6
    assert "throttle_seconds" not in written
    assert {"matmul_fraction", "memory_fraction"} <= set(written)


def test_a_cpu_process_has_all_of_its_numbers_in_the_file(tmp_path: Path) -> None:
    whole = cluster("cpu", gpus=4)
    head = replace(HEAD, any_size=True, nvml_names=())
    text = measured_profile_text(cluster=whole, sources={}, head=head)
    assert 'gpus_per_node = "any"' in text
    for gpus in (2, 4):
        found = read_back(text, tmp_path, gpus=gpus, per_node=gpus)
        assert found.device == whole.device


def test_a_domain_of_several_nodes_says_how_large_it_is(tmp_path: Path) -> None:
    inside, between = cluster(gpus=32).levels
    middle = replace(inside, name="rack", domain_gpus=16, ports=4)
    whole = replace(cluster(gpus=32), levels=(inside, middle, between))
    text = text_of(whole)
    assert [level["joins"] for level in tomllib.loads(text)["levels"]] == [
        "node",
        "domain",
        "cluster",
    ]
    assert read_back(text, tmp_path, gpus=32).levels == whole.levels


def test_the_network_stays_with_its_evidence(tmp_path: Path) -> None:
    network = Network(
        transport="roce", evidence="found on n01", hcas=("mlx5_0", "mlx5_1"), gid_index=3
    )
    said = NumberSource(key="found", what=network.evidence)
    whole = replace(cluster(gpus=16), network=network)
    text = text_of(whole, {f"cluster.network.{field.name}": said for field in fields(Network)})
    assert read_back(text, tmp_path, gpus=16).network == network


@pytest.mark.parametrize("name", ['a "quoted" \\ name', "tab\there", "café №5", "\x7f\x00", "]#="])
def test_any_name_of_a_device_can_be_written(name: str) -> None:
    head = replace(HEAD, nvml_names=(name,), device_description=name)
    text = measured_profile_text(cluster=cluster(gpus=8), sources={}, head=head)
    (read,) = tomllib.loads(text)["device"]["nvml_names"]
    assert read == "".join(c if c.isprintable() else " " for c in name)


def test_every_number_of_the_file_has_a_source() -> None:
    document = tomllib.loads(text_of(cluster(gpus=16)))
    tables = [
        *(document["device"][name] for name in ("numbers", "fit", "error")),
        *document["levels"],
    ]
    for table in tables:
        for entry in table.values():
            if isinstance(entry, dict):
                assert entry["source"] in document["sources"]
    numbers = {field.name for field in fields(Device)} - {"peak_fp8_flops_per_second"}
    assert numbers - set(document["device"]["numbers"]) == NO_NUMBERS
    assert set(document["device"]["fit"]) <= {field.name for field in fields(DeviceFit)}
    assert set(document["levels"][0]) - {"joins"} <= {field.name for field in fields(Level)}
