"""Host: CPU, memory, limits, and what lets adapters read device memory."""

from __future__ import annotations

import pytest

from fsdpplan.spec.machine import UNLIMITED_BYTES, Bridge
from fsdpplan.topology.read.host import host_of
from fsdpplan.topology.read.recording import Recording
from tests.topology.recorded import files, recorded

LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {}   {}    bytes     \n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 2023\n"
LSPCI = "lspci -D -vvv -d ::0604"
SWITCH = "0000:17:00.0 PCI bridge: Broadcom PEX890xx\n"
ROOT_PORT = "15:01.0 PCI bridge: Intel Corporation\n"


def test_a_dgx_h100_is_two_sockets_with_two_tib() -> None:
    host = host_of(recorded("dgx-h100"))
    assert (host.sockets, host.cores, host.numa_nodes) == (2, 224, 2)
    assert host.cpu == "Intel(R) Xeon(R) Platinum 8480CL"
    assert host.memory_bytes == 2112880640 * 1024
    assert host.locked_memory_bytes == UNLIMITED_BYTES
    assert host.shared_memory_bytes == 1081794887680
    assert (host.gpudirect, host.iommu, host.acs_bridges) == ("peermem", False, None)


def test_a_host_that_says_nothing_is_unknown() -> None:
    host = host_of(Recording())
    assert host.name == "localhost"
    assert {getattr(host, name) for name in host.__slots__ if name != "name"} == {None}


@pytest.mark.parametrize(
    ("soft", "locked_bytes"),
    [
        ("8388608", 8388608),
        ("unlimited", UNLIMITED_BYTES),
        ("18446744073709551615", UNLIMITED_BYTES),
        ("many", None),
        ("-1", None),
    ],
)
def test_the_soft_limit_of_locked_memory_counts(soft: str, locked_bytes: int | None) -> None:
    recording = Recording(files={"/proc/self/limits": LIMITS.format(soft, "unlimited")})
    assert host_of(recording).locked_memory_bytes == locked_bytes


@pytest.mark.parametrize(
    ("meminfo", "huge_bytes"),
    [
        ("Hugetlb: 2097152 kB\n", 2**31),
        ("HugePages_Total: 4\nHugepagesize: 2048 kB\n", 8 * 2**20),
        ("HugePages_Total: 0\nHugepagesize: 2048 kB\n", 0),
        ("HugePages_Total: 4\n", None),
        ("Hugepagesize: 2048\nHugePages_Total: 4\n", None),
    ],
)
def test_huge_pages_are_counted_in_bytes(meminfo: str, huge_bytes: int | None) -> None:
    assert host_of(files(meminfo=meminfo)).hugepage_bytes == huge_bytes


@pytest.mark.parametrize(
    ("driver", "kernel", "module", "gpudirect"),
    [
        (CLOSED, "5.15.0-91-generic", "nvidia_peermem/version", "peermem"),
        (None, "5.15.0", "nv_peer_mem/refcnt", "peermem"),
        (OPEN, "5.15.0-91-generic", None, "dmabuf"),
        (OPEN, "5.12.0", None, "dmabuf"),
        (OPEN, "5.4.0", None, "none"),
        (OPEN, None, None, None),
        (CLOSED, "6.8.0", None, "none"),
        ("garbage", "6.8.0", None, None),
        (None, "6.8.0", None, None),
    ],
)
def test_gpudirect_is_told_by_the_modules(
    driver: str | None, kernel: str | None, module: str | None, gpudirect: str | None
) -> None:
    texts = {
        "/proc/driver/nvidia/version": driver,
        "/proc/sys/kernel/osrelease": kernel,
        f"/sys/module/{module}": "1\n" if module else None,
    }
    recording = Recording(files={path: text for path, text in texts.items() if text is not None})
    assert host_of(recording).gpudirect == gpudirect


@pytest.mark.parametrize(
    ("driver", "kernel", "module", "gpudirect"),
    [
        (CLOSED, "5.10.0", "efa_nv_peermem", "peermem"),
        (CLOSED, "5.10.0", None, None),
        (OPEN, "5.10.0", None, None),
        (OPEN, "6.1.0", None, "dmabuf"),
    ],
)
def test_efa_may_read_device_memory_without_any_module(
    driver: str, kernel: str, module: str | None, gpudirect: str | None
) -> None:
    files = {"/proc/driver/nvidia/version": driver, "/proc/sys/kernel/osrelease": kernel}
    files |= {} if module is None else {f"/sys/module/{module}/version": "1.2.2\n"}
    links = {"/sys/class/infiniband/rdmap16s27/device/driver": "/sys/bus/pci/drivers/efa"}
    assert host_of(Recording(files=files, links=links)).gpudirect == gpudirect


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("gpu-001.example\n", "gpu-001.example"),
        ("n1; reboot\n", "localhost"),
        ("$(id)\n", "localhost"),
        ("-x\n", "localhost"),
        ("n1\x1b[31m\n", "localhost"),
    ],
)
def test_a_host_is_called_what_can_stand_in_a_command(said: str, name: str) -> None:
    assert host_of(Recording(files={"/proc/sys/kernel/hostname": said})).name == name


def test_the_cpu_is_one_printable_line() -> None:
    assert host_of(Recording(commands={"lscpu": "Model name: \x1b[31mXeon\n"})).cpu is None


@pytest.mark.parametrize(
    ("text", "bridges"),
    [
        (SWITCH + "\t\tACSCtl:\tSrcValid+ ReqRedir+\n", ["0000:17:00.0"]),
        (ROOT_PORT + "\t\tACSCtl:\tSrcValid+\n", ["0000:15:01.0"]),
        (SWITCH + "\t\tACSCtl:\tSrcValid- ReqRedir-\n" + ROOT_PORT, []),
        (SWITCH + "\tCapabilities: <access denied>\n", None),
        ("0000:18:00.0 Infiniband controller: Mellanox\n\t\tACSCtl:\tSrcValid+\n" + SWITCH, []),
        ("", None),
    ],
)
def test_bridges_with_access_control_are_named_where_it_may_be_read(
    text: str, bridges: list[str] | None
) -> None:
    found = host_of(Recording(commands={LSPCI: text})).acs_bridges
    assert found == (None if bridges is None else tuple(Bridge(bus_id=each) for each in bridges))


@pytest.mark.parametrize(
    ("groups", "cmdline", "unit", "iommu"),
    [
        (["DMA-FQ", "identity"], "", True, True),
        (["DMA"], "iommu=pt", True, True),
        (["identity", "identity"], "", True, False),
        ([], "iommu=pt", True, False),
        ([], "intel_iommu=off", False, False),
        ([], "", True, True),
        ([], "", False, None),
    ],
)
def test_the_groups_of_the_devices_tell_whether_addresses_are_translated(
    groups: list[str], cmdline: str, unit: bool, iommu: bool | None
) -> None:
    texts = {
        f"/sys/bus/pci/devices/0000:0{number}:00.0/iommu_group/type": f"{kind}\n"
        for number, kind in enumerate(groups)
    }
    recording = Recording(
        files=texts | {"/proc/cmdline": cmdline},
        links={"/sys/class/iommu/dmar0": "/sys/devices/virtual/iommu/dmar0"} if unit else {},
    )
    assert host_of(recording).iommu is iommu


def test_nodes_without_cores_are_no_numa_nodes() -> None:
    texts = {
        "/sys/devices/system/node/has_cpu": "0-1\n",
        "/sys/devices/system/node/online": "0-1,2-33\n",
    }
    assert host_of(Recording(files=texts)).numa_nodes == 2
