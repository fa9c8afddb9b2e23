"""NVML as data: a question that cannot be answered leaves its key out and changes no other."""

from __future__ import annotations

import json
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.topology.conclude.gpus import gpus_of, pairs_of
from fsdpplan.topology.read.nvml import nvml_facts
from fsdpplan.topology.read.recording import Recording
from tests.topology.fake_nvml import H100, FakeNvml, FakeNvmlError

OPTIONAL = sorted(
    {
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetPowerManagementLimit",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        "nvmlDeviceGetMaxClockInfo",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkVersion",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetGpuFabricInfo",
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetTopologyCommonAncestor",
    }
)
RACK = "7a3d1c52b9e04f6890ab4c17d2e8f035"
DIVIDED = H100 | {
    "mig": [1, 1],
    "mig_devices": (
        {"name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "uuid": "MIG-aaaa", "memory": 42_000_000_000},
        {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "uuid": "MIG-bbbb", "memory": 10_000_000_000},
    ),
}
HOST = [H100 | {"fabric": RACK}, DIVIDED, H100]


def facts_of(nvml: FakeNvml) -> Any:
    """As a recording has them after its way over disk."""
    return json.loads(json.dumps(nvml_facts(nvml)[0]))


@pytest.mark.parametrize("as_bytes", [False, True], ids=["text", "bytes"])
def test_all_of_a_gpu_is_said_in_nvmls_numbers(as_bytes: bool) -> None:
    facts = facts_of(FakeNvml([H100 | {"fabric": RACK}], as_bytes=as_bytes))
    assert (facts["driver"], facts["cuda"]) == ("570.86.15", "12.8")
    link = {
        "state": 1,
        "version": 7,
        "remote_type": 2,
        "remote_bus_id": "00000000:86:00.0",
        "speed_megabytes_per_second": 26_562,
    }
    assert facts["gpus"] == [
        {
            "index": 0,
            "name": "NVIDIA H100 80GB HBM3",
            "uuid": "GPU-0000-aaaa",
            "bus_id": "00000000:1B:00.0",
            "memory_bytes": 85_520_809_984,
            "compute_capability": [9, 0],
            "power_limit_milliwatts": 650_000,
            "default_power_limit_milliwatts": 700_000,
            "max_sm_clock_megahertz": 1980,
            "max_memory_clock_megahertz": 2619,
            "ecc": 1,
            "mig": 0,
            "mig_devices": [],
            "pcie_generation": 4,
            "pcie_width": 8,
            "pcie_max_generation": 5,
            "pcie_max_width": 16,
            "numa_node": 1,
            "cpu_affinity": [255, 0, 255],
            "nvlinks": [{"link": 0} | link, {"link": 1} | link, {"link": 2, "state": 0}],
            "fabric": {"cluster_uuid": RACK, "clique": 7, "state": 3, "status": 0},
        }
    ]


def test_what_nvml_says_becomes_the_gpus_of_the_host() -> None:
    facts, failures = nvml_facts(FakeNvml(HOST))
    gpus = gpus_of(Recording(nvml=facts))
    assert failures == ()
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[0].cpu_affinity == "0-7,128-135"
    assert gpus[0].fabric is not None
    assert gpus[0].fabric.cluster_uuid == "7a3d1c52-b9e0-4f68-90ab-4c17d2e8f035"
    assert [link.bandwidth_bytes_per_second for link in gpus[0].nvlinks] == [25e9, 25e9, None]
    assert [device.name for device in gpus[1].mig_devices] == ["MIG 3g.40gb", "MIG 1g.10gb"]
    assert [pair.p2p for pair in pairs_of(Recording(nvml=facts))] == ["ok", "topology", "ok"]


def test_mig_devices_are_recorded_with_the_uuids_that_name_them() -> None:
    [_, gpu, _] = facts_of(FakeNvml(HOST))["gpus"]
    assert gpu["mig_devices"] == [
        {"name": "MIG 3g.40gb", "uuid": "MIG-aaaa", "memory_bytes": 42_000_000_000},
        {"name": "MIG 1g.10gb", "uuid": "MIG-bbbb", "memory_bytes": 10_000_000_000},
    ]


def test_a_lost_gpu_is_said_and_the_others_are_read() -> None:
    facts, failures = nvml_facts(FakeNvml([H100] * 8, lost={5}))
    assert failures == ("GPU 5: GPU is lost",)
    assert len(gpus_of(Recording(nvml=facts))) == 7


def test_without_even_a_count_there_is_no_answer() -> None:
    with pytest.raises(FakeNvmlError):
        nvml_facts(FakeNvml([H100], unsupported={"nvmlDeviceGetCount"}))


def test_an_old_driver_says_one_speed_for_all_links_that_are_up() -> None:
    [gpu] = facts_of(FakeNvml([H100 | {"speed_field": 90, "link_speed": 25_000}]))["gpus"]
    assert [link.get("speed_megabytes_per_second") for link in gpu["nvlinks"]] == [
        25_000,
        25_000,
        None,
    ]


def test_the_fabric_is_had_from_drivers_that_know_it_by_its_old_name() -> None:
    nvml = FakeNvml([H100 | {"fabric": RACK}], absent={"c_nvmlGpuFabricInfoV_t"})
    assert facts_of(nvml)["gpus"][0]["fabric"]["cluster_uuid"] == RACK


def test_a_gpu_near_two_numa_nodes_is_at_none() -> None:
    [gpu] = facts_of(FakeNvml([H100 | {"nodes": [0b11]}]))["gpus"]
    assert "numa_node" not in gpu


def test_the_binding_has_every_function_that_is_asked() -> None:
    nvml = FakeNvml(HOST)
    nvml_facts(nvml)
    assert nvml.asked >= set(OPTIONAL)
    assert [name for name in nvml.asked if not hasattr(pynvml, name)] == []


def contained(small: Any, large: Any) -> bool:
    """`small` is `large` with keys and list entries left out."""
    if isinstance(small, dict):
        return small.keys() <= large.keys() and all(
            contained(value, large[key]) for key, value in small.items()
        )
    if isinstance(small, list) and small and isinstance(small[0], dict):
        return all(any(contained(one, other) for other in large) for one in small)
    return bool(small == large) or small == []


@given(unsupported=st.sets(st.sampled_from(OPTIONAL)), absent=st.sets(st.sampled_from(OPTIONAL)))
def test_what_cannot_be_asked_leaves_a_gap_and_nothing_else(
    unsupported: set[str], absent: set[str]
) -> None:
    facts = facts_of(FakeNvml(HOST, unsupported=unsupported, absent=absent))
    assert contained(facts, facts_of(FakeNvml(HOST)))
    assert [gpu["index"] for gpu in facts["gpus"]] == [0, 1, 2]
    gpus_of(Recording(nvml=facts))
