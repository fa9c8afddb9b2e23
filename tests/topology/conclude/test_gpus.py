"""GPUs of a recording: a field is what was said, or unknown."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.machine import Gpu
from fsdpplan.topology.conclude.gpus import gpus_of, pairs_of
from fsdpplan.topology.read.recording import Recording
from tests.topology.read.test_recording import JSON
from tests.topology.recorded import recorded

NVML: Any = recorded("dgx-h100").nvml
WITH_GPUS = ("dgx-a100", "dgx-h100", "gb200-tray", "mig", "pcie-two-sockets", "rtx-4090")


def one_gpu(**facts: Any) -> Gpu:
    gpu = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "compute_capability": [9, 0]} | facts
    [found] = gpus_of(Recording(nvml={"gpus": [gpu]}))
    return found


def test_a_gpu_of_which_only_the_name_is_known_is_one() -> None:
    [gpu] = gpus_of(Recording(nvml={"gpus": [{"index": 2, "name": "X"}]}))
    said = {each.name for each in fields(Gpu) if getattr(gpu, each.name) not in (None, ())}
    assert (said, gpu.index, gpu.name) == ({"index", "name"}, 2, "X")


@pytest.mark.parametrize(
    ("nvml", "count"),
    [
        (None, 0),
        ({}, 0),
        ({"gpus": None}, 0),
        ({"gpus": [{"name": "X"}, {"index": 1}, 7, {"index": True, "name": "X"}]}, 0),
        ({"gpus": [{"index": 1, "name": "X"}, {"index": 1, "name": "Y"}]}, 1),
    ],
)
def test_what_has_no_number_and_name_is_no_gpu(nvml: Any, count: int) -> None:
    assert len(gpus_of(Recording(nvml=nvml))) == count


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ({"bus_id": "00000000:1B:00.0"}, "bus_id", "0000:1b:00.0"),
        ({"bus_id": "0008:01:00.0"}, "bus_id", "0008:01:00.0"),
        ({"bus_id": "00010000:01:00.0"}, "bus_id", "10000:01:00.0"),
        ({"bus_id": "1B:00.0"}, "bus_id", None),
        ({"bus_id": "00000000:00:00.0"}, "bus_id", None),
        ({"memory_bytes": 0}, "memory_bytes", None),
        ({"memory_bytes": -1}, "memory_bytes", None),
        ({"memory_bytes": 8.5e10}, "memory_bytes", None),
        ({"memory_bytes": True}, "memory_bytes", None),
        ({"memory_bytes": 2**63}, "memory_bytes", None),
        ({"power_limit_milliwatts": 650_000}, "power_limit_watts", 650.0),
        ({"max_sm_clock_megahertz": 1980}, "max_sm_clock_hertz", 1.98e9),
        ({"compute_capability": [12, 1]}, "compute_capability", "12.1"),
        ({"compute_capability": [9]}, "compute_capability", None),
        ({"compute_capability": "9.0"}, "compute_capability", None),
        ({"ecc": 1}, "ecc_enabled", True),
        ({"ecc": 2}, "ecc_enabled", None),
        ({"mig": 0}, "mig_enabled", False),
        ({"numa_node": 0}, "numa_node", 0),
        ({"numa_node": -1}, "numa_node", None),
        ({"cpu_affinity": [0b1011, 0, 1 << 63]}, "cpu_affinity", "0-1,3,191"),
        ({"cpu_affinity": [2**64 - 1, 1]}, "cpu_affinity", "0-64"),
        ({"cpu_affinity": []}, "cpu_affinity", None),
        ({"cpu_affinity": [2**64]}, "cpu_affinity", None),
        ({"cpu_affinity": "0-55,112"}, "cpu_affinity", None),
        ({"cpu_affinity": "$(id)"}, "cpu_affinity", None),
        ({"name": "two\nlines", "uuid": "two\nlines"}, "uuid", None),
    ],
)
def test_a_field_is_what_was_said_or_unknown(said: dict[str, Any], field: str, value: Any) -> None:
    if "name" in said:
        said = said | {"name": "X"}
    assert getattr(one_gpu(**said), field) == value


def test_the_kernel_is_asked_for_the_numa_node_that_the_driver_does_not_say() -> None:
    nvml = {"gpus": [{"index": 0, "name": "X", "bus_id": "00000000:1B:00.0"}]}
    path = "/sys/bus/pci/devices/0000:1b:00.0/numa_node"
    [near] = gpus_of(Recording(nvml=nvml, files={path: "1\n"}))
    [unknown] = gpus_of(Recording(nvml=nvml, files={path: "-1\n"}))
    assert (near.numa_node, unknown.numa_node) == (1, None)


@pytest.mark.parametrize(
    ("fabric", "joined"),
    [
        ({}, True),
        ({"cluster_uuid": "7A3D1C52-B9E0-4F68-90AB-4C17D2E8F035"}, True),
        ({"state": 2}, False),
        ({"status": 3}, False),
        ({"cluster_uuid": "0" * 32}, False),
        ({"cluster_uuid": "7a3d"}, False),
        ({"clique": None}, False),
    ],
)
def test_a_gpu_is_in_a_domain_of_many_hosts_once_it_has_joined(
    fabric: dict[str, Any], joined: bool
) -> None:
    whole = {"cluster_uuid": "7a3d1c52b9e04f6890ab4c17d2e8f035", "clique": 3} | {
        "state": 3,
        "status": 0,
    }
    found = one_gpu(fabric=whole | fabric).fabric
    assert (found is not None) == joined
    if found is not None:
        assert (found.cluster_uuid, found.clique) == ("7a3d1c52-b9e0-4f68-90ab-4c17d2e8f035", 3)


def test_cuda_visible_devices_hides_gpus_and_the_pairs_with_them() -> None:
    recording = Recording(nvml=NVML, environment={"CUDA_VISIBLE_DEVICES": "6,2"})
    assert [gpu.index for gpu in gpus_of(recording)] == [6, 2]
    assert [(pair.first, pair.second) for pair in pairs_of(recording)] == [(2, 6)]


@pytest.mark.parametrize(
    ("said", "pairs"),
    [
        ({"first": 1, "second": 0, "p2p": 5, "ancestor": 10}, [(0, 1, "not_supported", "single")]),
        ({"first": 0, "second": 1, "p2p": 6, "ancestor": 15}, [(0, 1, None, None)]),
        ({"first": 0, "second": 0, "p2p": 0}, []),
        ({"first": 0, "second": 7, "p2p": 0}, []),
        ({"first": 0}, []),
    ],
)
def test_a_pair_is_of_two_gpus_that_are_here(said: dict[str, Any], pairs: list[Any]) -> None:
    nvml = {"gpus": [{"index": 0, "name": "X"}, {"index": 1, "name": "X"}], "pairs": [said]}
    found = pairs_of(Recording(nvml=nvml))
    assert [(pair.first, pair.second, pair.p2p, pair.ancestor) for pair in found] == pairs


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything that can be taken out."""
    keys = value if isinstance(value, dict) else range(len(value))
    return [
        found
        for key in keys
        for found in [
            (*path, key),
            *(leaves(value[key], (*path, key)) if isinstance(value[key], dict | list) else []),
        ]
    ]


def changed(nvml: Any, path: tuple[Any, ...], **put: Any) -> Any:
    """`nvml` without what is at `path`, or with `put["value"]` there."""
    result = copy.deepcopy(nvml)
    here = result
    for step in path[:-1]:
        here = here[step]
    if "value" in put:
        here[path[-1]] = put["value"]
    elif isinstance(here, dict):
        del here[path[-1]]
    return result


@given(data=st.data(), name=st.sampled_from(WITH_GPUS))
def test_what_is_taken_out_becomes_unknown_and_is_never_made_up(
    data: st.DataObject, name: str
) -> None:
    nvml = recorded(name).nvml
    whole = {gpu.index: gpu for gpu in gpus_of(Recording(nvml=nvml))}
    for path in data.draw(st.lists(st.sampled_from(leaves(nvml)), max_size=4)):
        try:
            nvml = changed(nvml, path)
        except (KeyError, TypeError):
            continue
    for gpu in gpus_of(Recording(nvml=nvml)):
        before = whole[gpu.index]
        links = {link.link: link for link in before.nvlinks}
        for each in fields(Gpu):
            value = getattr(gpu, each.name)
            if each.name == "nvlinks":
                assert all(is_part(link, links[link.link]) for link in value)
            elif each.name == "mig_devices":
                assert all(
                    any(is_part(one, other) for other in before.mig_devices) for one in value
                )
            else:
                assert value in (None, getattr(before, each.name))


def is_part(value: Any, whole: Any) -> bool:
    """Every field of a value is that of the whole, or unknown."""
    return all(
        getattr(value, each.name) in (None, getattr(whole, each.name)) for each in fields(whole)
    )


@given(data=st.data(), junk=JSON)
def test_junk_in_place_of_anything_is_no_reason_to_fail(data: st.DataObject, junk: Any) -> None:
    path = data.draw(st.sampled_from(leaves(NVML)))
    recording = Recording(nvml=changed(NVML, path, value=junk))
    assert len(gpus_of(recording)) <= 8
    assert len(pairs_of(recording)) <= 28
