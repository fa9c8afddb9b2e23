"""PCI: the way to a device, how near two devices are, and what their links run at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.topology.conclude.machine import machine_of
from fsdpplan.topology.read.pci import (
    PciLink,
    bus_id_in,
    path_in,
    pci_link_of,
    pci_path_between,
    pci_paths_of,
    way_in,
)
from fsdpplan.topology.read.recording import Recording
from tests.topology.recorded import recorded

ROOT = ("pci0000:15", "0000:15:01.0")
SWITCH = (*ROOT, "0000:16:00.0")
NIC = (*SWITCH, "0000:17:00.0", "0000:18:00.0")
GPU = (*SWITCH, "0000:17:01.0", "0000:19:00.0")
DEEP = (*SWITCH, "0000:17:02.0", "0000:1a:00.0", "0000:1b:00.0", "0000:1c:00.0")


@pytest.mark.parametrize(
    ("path", "way"),
    [
        ("/sys/devices/" + "/".join(GPU), GPU),
        ("/sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0", ("pci0000:00", "0000:00:03.0")),
        (
            "/sys/devices/LNXSYSTM:00/VMBUS:00/guid/pci0001:00/0001:00:00.0",
            ("pci0001:00", "0001:00:00.0"),
        ),
        ("/sys/devices/pci10000:e0/10000:e0:01.0", ("pci10000:e0", "10000:e0:01.0")),
        ("/sys/devices/virtual/net/bond0", None),
        ("/sys/devices/pci0000:15", None),
        ("", None),
        (None, None),
    ],
)
def test_the_way_to_a_device_is_its_bridges(path: str | None, way: tuple[str, ...] | None) -> None:
    assert way_in(path) == way
    assert bus_id_in(path) == (way[-1] if way else None)


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        (GPU, NIC, "pix"),
        (GPU, DEEP, "pxb"),
        (GPU, (*GPU[:-1], "0000:19:00.1"), "pix"),
        (GPU, ("pci0000:15", "0000:15:02.0", "0000:20:00.0"), "phb"),
        (GPU, ("pci0000:26", "0000:26:01.0", "0000:27:00.0"), "node"),
    ],
    ids=["one switch", "two switches", "two functions", "one host bridge", "one NUMA node"],
)
def test_nearness_is_the_switches_on_the_way(
    first: tuple[str, ...], second: tuple[str, ...], path: str
) -> None:
    assert pci_path_between(first, second, numa_node=0, other_numa_node=0) == path
    assert pci_path_between(second, first, numa_node=0, other_numa_node=0) == path


@pytest.mark.parametrize(
    ("node", "other", "path"), [(0, 1, "sys"), (None, 1, None), (0, None, None)]
)
def test_across_host_bridges_the_numa_nodes_tell(
    node: int | None, other: int | None, path: str | None
) -> None:
    far = ("pci0000:97", "0000:97:01.0", "0000:98:00.0")
    assert pci_path_between(GPU, far, numa_node=node, other_numa_node=other) == path


@given(st.integers(2, len(DEEP)), st.integers(2, len(GPU)))
def test_nearness_does_not_depend_on_the_order(one: int, other: int) -> None:
    first, second = DEEP[:one], GPU[:other]
    there = pci_path_between(first, second, numa_node=0, other_numa_node=0)
    assert there == pci_path_between(second, first, numa_node=0, other_numa_node=0)
    assert there in ("pix", "pxb", "phb")


@pytest.mark.parametrize(
    ("speed", "width", "generation", "lanes"),
    [
        ("32.0 GT/s PCIe\n", "16\n", 5, 16),
        ("2.5 GT/s PCIe", "1", 1, 1),
        ("8 GT/s", "8", 3, 8),
        ("Unknown", "0", None, None),
        ("64.0 GT/s PCIe", "63", 6, None),
        ("99 GT/s", "-1", None, None),
        ("", "", None, None),
    ],
)
def test_a_link_has_the_generation_of_its_rate(
    speed: str, width: str, generation: int | None, lanes: int | None
) -> None:
    recording = Recording(files={"/d/current_link_speed": speed, "/d/max_link_width": width})
    assert pci_link_of(recording, "/d") == PciLink(
        generation=generation, width=None, max_generation=None, max_width=lanes
    )


def test_a_device_is_found_by_its_address_or_by_its_adapter() -> None:
    recording = Recording(
        links={
            f"/sys/bus/pci/devices/{GPU[-1]}": "/sys/devices/" + "/".join(GPU),
            "/sys/class/infiniband/mlx5_0/device": "/sys/devices/" + "/".join(NIC),
            "/sys/bus/pci/devices/0000:66:00.0": "/sys/devices/" + "/".join(GPU),
        }
    )
    wanted = (GPU[-1], NIC[-1], "0000:66:00.0", "0000:77:00.0")
    assert pci_paths_of(recording, wanted) == ((NIC[-1], NIC), (GPU[-1], GPU))


def test_on_a_dgx_h100_each_gpu_has_one_adapter_behind_its_own_switches() -> None:
    machine = machine_of(recorded("dgx-h100"))
    fabric = [nic for nic in machine.nics if nic.link_layer == "infiniband"]
    for gpu in machine.gpus:
        assert gpu.bus_id is not None
        paths = [path_in(machine, gpu.bus_id, nic.bus_id or "") for nic in fabric]
        assert paths.count("pxb") == 1, gpu.index
        assert set(paths) == {"pxb", "node", "sys"}, gpu.index


def test_an_unknown_device_is_at_no_distance() -> None:
    machine = machine_of(recorded("dgx-h100"))
    assert path_in(machine, "0000:1b:00.0", "ffff:00:00.0") is None
