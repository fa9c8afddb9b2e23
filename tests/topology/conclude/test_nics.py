"""Adapters: ports of InfiniBand, RoCE and EFA as sysfs shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.spec.machine import Gid
from fsdpplan.topology.conclude.nics import nics_of
from fsdpplan.topology.read.recording import Recording
from tests.topology.recorded import recorded

PORT = "/sys/class/infiniband/mlx5_0/ports/1"
DEVICE = "/sys/class/infiniband/mlx5_0/device"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a01:0203\n"
LINK_LOCAL = "fe80:0000:0000:0000:ba3f:d2ff:fe12:3456\n"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000\n"


def port(**texts: str) -> Recording:
    """An adapter with one port of these files."""
    return Recording(
        files={f"{PORT}/state": "4: ACTIVE\n"}
        | {f"{PORT}/{name}": text for name, text in texts.items()}
    )


def with_gids(*entries: tuple[str, str, str]) -> Recording:
    """(GID, type, interface) of each entry; an empty text is a file that could not be read."""
    folders = ("gids", "gid_attrs/types", "gid_attrs/ndevs")
    return Recording(
        files={f"{PORT}/state": "4: ACTIVE\n"}
        | {
            f"{PORT}/{folder}/{index}": text
            for index, entry in enumerate(entries)
            for folder, text in zip(folders, entry, strict=True)
            if text
        }
    )


@pytest.mark.parametrize(
    ("rate", "bytes_per_second"),
    [
        ("400 Gb/sec (4X NDR)\n", 50e9),
        ("100 Gb/sec (4X EDR)", 12.5e9),
        ("2.5 Gb/sec (1X SDR)", 0.3125e9),
        ("800 Gb/sec (4X XDR)", 100e9),
        ("0 Gb/sec", None),
        ("400 Gb", None),
        ("", None),
        ("999999999 Gb/sec", None),
    ],
)
def test_a_rate_is_bits_of_one_direction(rate: str, bytes_per_second: float | None) -> None:
    (nic,) = nics_of(port(rate=rate))
    assert nic.rate_bytes_per_second == bytes_per_second


@pytest.mark.parametrize(
    ("state", "known"),
    [
        ("4: ACTIVE", "active"),
        ("1: DOWN", "down"),
        ("2: INIT", "init"),
        ("3: ARMED", "armed"),
        ("5: ACTIVE_DEFER", None),
        ("4", None),
        ("", None),
    ],
)
def test_a_state_is_the_word_after_its_number(state: str, known: str | None) -> None:
    (nic,) = nics_of(port(state=state))
    assert nic.state == known


def test_a_port_that_is_down_has_no_rate() -> None:
    # the kernel prints the slowest rate there is
    (nic,) = nics_of(port(state="1: DOWN\n", rate="10 Gb/sec (4X SDR)\n"))
    assert nic.rate_bytes_per_second is None


def test_a_port_without_light_is_down_even_if_its_state_is_unread() -> None:
    dark = Recording(files={f"{PORT}/phys_state": "2: Polling\n"})
    lit = Recording(files={f"{PORT}/phys_state": "5: LinkUp\n"})
    assert nics_of(dark)[0].state == "down"
    assert nics_of(lit)[0].state is None


@pytest.mark.parametrize(
    ("text", "driver", "layer"),
    [
        ("InfiniBand\n", "mlx5_core", "infiniband"),
        ("Ethernet\n", "bnxt_en", "ethernet"),
        ("Unspecified\n", "efa", "efa"),
        ("Unknown\n", "efa", "efa"),
        ("Unspecified\n", "siw", "unspecified"),
        ("Token Ring\n", "efa", None),
    ],
)
def test_the_link_layer_is_named_and_efa_is_told_by_its_driver(
    text: str, driver: str, layer: str | None
) -> None:
    recording = replace(
        port(link_layer=text), links={f"{DEVICE}/driver": f"/sys/bus/pci/drivers/{driver}"}
    )
    assert nics_of(recording)[0].link_layer == layer


def test_the_gid_table_keeps_used_entries_and_no_address() -> None:
    recording = with_gids(
        (LINK_LOCAL, "IB/RoCE v1\n", "ens10\n"),
        (LINK_LOCAL, "RoCE v2\n", "ens10\n"),
        (EMPTY, "", ""),
        (IPV4, "RoCE v2\n", "ens10.100\n"),
        (IPV4, "", "ens10\n"),
        ("garbage", "RoCE v2\n", "ens10\n"),
    )
    (nic,) = nics_of(recording)
    assert nic.gids == (
        Gid(index=0, kind="IB/RoCE v1", gid="fe80::x", interface="ens10"),
        Gid(index=1, kind="RoCE v2", gid="fe80::x", interface="ens10"),
        Gid(index=3, kind="RoCE v2", gid="::ffff:x.x.x.x", interface="ens10.100"),
    )
    assert nic.interface == "ens10"


def test_one_device_with_two_ports_has_an_interface_on_each() -> None:
    net = "/sys/class/net"
    recording = Recording(
        files={
            f"{PORT}/state": "4: ACTIVE\n",
            "/sys/class/infiniband/mlx5_0/ports/2/state": "4: ACTIVE\n",
            f"{net}/ib0/dev_port": "0\n",
            f"{net}/ib1/dev_port": "1\n",
        },
        links={
            f"{DEVICE}/net/{name}": f"/sys/devices/pci0000:00/{name}" for name in ("ib0", "ib1")
        },
    )
    assert [(nic.port, nic.interface) for nic in nics_of(recording)] == [(1, "ib0"), (2, "ib1")]


@pytest.mark.parametrize(
    ("links", "texts", "virtual"),
    [
        ({f"{DEVICE}/physfn": "/sys/devices/pci0000:00/0000:00:01.0"}, {}, True),
        ({}, {f"{DEVICE}/sriov_totalvfs": "8\n"}, False),
        ({}, {}, None),
    ],
)
def test_a_virtual_function_shows_its_physical_one(
    links: dict[str, str], texts: dict[str, str], virtual: bool | None
) -> None:
    recording = Recording(files={f"{PORT}/state": "4: ACTIVE\n"} | texts, links=links)
    assert nics_of(recording)[0].virtual_function is virtual


def test_a_dgx_h100_has_eight_fabric_ports_in_the_order_of_their_numbers() -> None:
    nics = nics_of(recorded("dgx-h100"))
    assert [nic.name for nic in nics] == [f"mlx5_{number}" for number in range(len(nics))]
    single = [nic for nic in nics if nic.link_layer == "infiniband"]
    assert {nic.rate_bytes_per_second for nic in single} == {50e9}
    assert {(nic.pcie_generation, nic.pcie_width) for nic in nics} == {(5, 16)}
    assert all(nic.bus_id and nic.interface and nic.firmware for nic in nics)


def test_a_p5_has_32_efa_devices_without_interfaces() -> None:
    nics = nics_of(recorded("p5-efa"))
    assert len(nics) == 32
    assert {(nic.link_layer, nic.rate_bytes_per_second, nic.interface) for nic in nics} == {
        ("efa", 12.5e9, None)
    }


def test_a_bond_of_two_ports_is_one_adapter_on_the_bond() -> None:
    (bond,) = (nic for nic in nics_of(recorded("roce")) if nic.name == "mlx5_bond_0")
    assert bond.interface == "bond0"


def test_a_bond_that_does_not_name_itself_is_not_taken_for_one_of_its_ports() -> None:
    folder = "/sys/class/infiniband/mlx5_bond_0"
    recording = Recording(
        files={f"{folder}/ports/1/state": "4: ACTIVE\n"},
        links={f"{folder}/device/net/ens1f0": "/sys/devices/pci0000:00/net/ens1f0"},
    )
    assert nics_of(recording)[0].interface is None


def test_what_is_no_port_is_left_out() -> None:
    assert nics_of(Recording(files={"/sys/class/infiniband/x/ports/../state": "4: ACTIVE"})) == ()
    assert nics_of(recorded("nothing")) == ()
