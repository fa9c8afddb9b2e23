"""Surroundings: Slurm, Kubernetes, the cloud and other accelerators, each by its evidence."""

from __future__ import annotations

import pytest

from fsdpplan.topology.read.recording import Recording
from fsdpplan.topology.read.surroundings import (
    cloud_of,
    kubernetes_of,
    other_accelerators_of,
    slurm_of,
)
from tests.topology.recorded import NAMES, recorded

DMI = "/sys/class/dmi/id"
AZURE = "7783-7084-3265-9085-8269-3286-77"
PCI = "/sys/bus/pci/devices"


def test_inside_of_an_allocation_slurm_names_job_nodes_and_gpus() -> None:
    slurm = slurm_of(recorded("slurm-node"))
    assert slurm is not None
    assert (slurm.version, slurm.job_id, slurm.partition) == ("24.05.4", "48213", "batch")
    assert slurm.nodes == ("gpu-003", "gpu-004")
    assert (slurm.gres, slurm.given_gpus) == ("gpu:h100:8", 8)


@pytest.mark.parametrize(
    ("node", "gres", "partition"),
    [
        (
            "NodeName=n1\nGres=gpu:a100:4(S:0,1),shard:8\nPartitions=a,b\n",
            "gpu:a100:4,shard:8",
            None,
        ),
        ("NodeName=n1\nGres=(null)\nPartitions=batch\n", None, "batch"),
        ("NodeName=n1 AvailableFeatures=Gres\n", None, None),
    ],
)
def test_outside_of_a_job_slurm_says_what_the_node_has(
    node: str, gres: str | None, partition: str | None
) -> None:
    slurm = slurm_of(Recording(commands={"scontrol show node n1": node}))
    assert slurm is not None
    assert (slurm.job_id, slurm.nodes) == (None, ())
    assert (slurm.gres, slurm.partition) == (gres, partition)


@pytest.mark.parametrize("answer", ["slurm 23.11.4\n", "slurm-wlm 23.11.4\n"])
def test_slurm_says_its_version(answer: str) -> None:
    slurm = slurm_of(Recording(commands={"scontrol version": answer}))
    assert slurm is not None
    assert slurm.version == "23.11.4"


def test_without_slurm_there_is_none_and_a_broken_list_names_no_node() -> None:
    assert slurm_of(Recording(environment={"SLURM_JOB_ID": "; rm"})) is None
    broken = Recording(environment={"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-"})
    slurm = slurm_of(broken)
    assert slurm is not None
    assert slurm.nodes == ()


@pytest.mark.parametrize(
    ("environment", "cgroup", "inside"),
    [
        ({"KUBERNETES_SERVICE_PORT": "443"}, "0::/\n", True),
        ({}, "0::/kubepods.slice/pod1\n", True),
        ({}, "0::/system.slice\n", False),
    ],
)
def test_a_pod_is_told_by_its_environment_or_its_group(
    environment: dict[str, str], cgroup: str, inside: bool
) -> None:
    recording = Recording(environment=environment, files={"/proc/1/cgroup": cgroup})
    assert kubernetes_of(recording) is inside


@pytest.mark.parametrize(
    ("firmware", "provider", "instance_type"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws", "p5.48xlarge"),
        (
            {"sys_vendor": "Amazon EC2", "product_name": "p6-b200.48xlarge"},
            "aws",
            "p6-b200.48xlarge",
        ),
        ({"sys_vendor": "Amazon EC2", "product_name": "Not Specified"}, "aws", None),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp", None),
        (
            {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE},
            "azure",
            None,
        ),
        ({"sys_vendor": "QEMU", "chassis_asset_tag": "OracleCloud.com"}, "oci", None),
    ],
)
def test_a_cloud_is_told_by_its_firmware(
    firmware: dict[str, str], provider: str, instance_type: str | None
) -> None:
    cloud = cloud_of(Recording(files={f"{DMI}/{name}": text for name, text in firmware.items()}))
    assert cloud is not None
    assert (cloud.provider, cloud.instance_type) == (provider, instance_type)
    assert cloud.evidence.startswith(DMI)
    assert any(text in cloud.evidence for text in firmware.values())


@pytest.mark.parametrize(
    "firmware",
    [
        {"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"},
        {"sys_vendor": "NVIDIA", "product_name": "DGXH100"},
        {"sys_vendor": "QEMU", "product_name": "p5.48xlarge"},
        {},
    ],
    ids=["Hyper-V", "DGX", "another hypervisor", "nothing"],
)
def test_no_cloud_is_assumed(firmware: dict[str, str]) -> None:
    files = {f"{DMI}/{name}": text for name, text in firmware.items()}
    assert cloud_of(Recording(files=files)) is None


def pci(*devices: tuple[str, str]) -> Recording:
    """Devices of (vendor, class)."""
    texts = {}
    for number, (vendor, kind) in enumerate(devices):
        texts[f"{PCI}/0000:{number:02x}:00.0/vendor"] = f"{vendor}\n"
        texts[f"{PCI}/0000:{number:02x}:00.0/class"] = f"{kind}\n"
    return Recording(files=texts)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([("0x1da3", "0x120000")] * 8, ("8 Intel Gaudi accelerators",)),
        ([("0x1002", "0x038000")], ("1 AMD GPU",)),
        ([("0x1002", "0x030000"), ("0x10de", "0x030200"), ("0x1002", "0x020000")], ()),
    ],
    ids=["Gaudi", "AMD without ROCm", "a display, NVIDIA, a network card"],
)
def test_accelerators_of_others_are_told_by_vendor_and_class(
    devices: list[tuple[str, str]], words: tuple[str, ...]
) -> None:
    assert other_accelerators_of(pci(*devices)) == words


@pytest.mark.parametrize(
    ("version", "name"), [("90402", "gfx942"), ("90010", "gfx90a"), ("110501", "gfx1151")]
)
def test_rocm_names_its_targets(version: str, name: str) -> None:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    cpu = "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n"
    gpu = f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\n"
    files = {f"{nodes}/0/properties": cpu, f"{nodes}/1/properties": gpu}
    assert other_accelerators_of(Recording(files=files)) == (f"1 AMD GPU ({name})",)


def test_only_the_amd_machine_has_accelerators_of_others() -> None:
    found = {name: other_accelerators_of(recorded(name)) for name in NAMES}
    assert found.pop("amd-mi300x") == ("8 AMD GPUs (gfx942)",)
    assert set(found.values()) == {()}
