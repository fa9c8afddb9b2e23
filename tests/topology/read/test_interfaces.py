"""Interfaces: which are up, how fast, and the networks behind them, never an address."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.topology.read.interfaces import interfaces_of
from fsdpplan.topology.read.recording import Recording
from tests.topology.recorded import recorded

ETH = "/sys/class/net/eth0"
HEADING = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
IP6 = "ip -json -6 route show table main"


def route(destination: str, flags: str, mask: str, interface: str = "eth0") -> str:
    return f"{interface}\t{destination}\tx\t{flags}\t0\t0\t0\t{mask}\t0\t0\t0"


def eth0(*routes: str, ip6: object = (), **texts: str) -> Recording:
    files = {f"{ETH}/operstate": "up\n"} | {f"{ETH}/{name}": text for name, text in texts.items()}
    files["/proc/net/route"] = "\n".join([HEADING, *routes]) + "\n"
    return Recording(files=files, commands={IP6: json.dumps(ip6)})


@pytest.mark.parametrize(
    ("state", "up"),
    [("up", True), ("down", False), ("lowerlayerdown", False), ("unknown", None), ("", None)],
)
def test_up_is_what_the_kernel_says(state: str, up: bool | None) -> None:
    assert interfaces_of(eth0(operstate=state))[0].up is up


@pytest.mark.parametrize(
    ("speed", "bytes_per_second"),
    [("400000\n", 50e9), ("1000", 125e6), ("-1", None), ("4294967295", None), ("0", None)],
)
def test_speed_is_megabits_or_unknown(speed: str, bytes_per_second: float | None) -> None:
    assert interfaces_of(eth0(speed=speed))[0].speed_bytes_per_second == bytes_per_second


def test_networks_are_those_reached_without_a_gateway() -> None:
    (interface,) = interfaces_of(
        eth0(
            route("00000000", "0003", "00000000"),
            route("0000010A", "0001", "0000FFFF"),
            route("00000A0A", "0003", "0000FFFF"),
            route("0000FEA9", "0001", "0000FFFF"),
            route("0102000A", "0005", "FFFFFFFF"),
            route("0000630A", "0201", "0000FFFF"),
            route("0000020A", "0001", "0000FFFF", interface="eth1"),
        )
    )
    assert interface.networks == ("10.1.0.0/16",)
    assert interface.default_route


def test_ipv6_networks_and_default_routes_are_read_too() -> None:
    (interface,) = interfaces_of(
        eth0(
            ip6=[
                {"dst": "fd00:1::/64", "dev": "eth0"},
                {"dst": "fe80::/64", "dev": "eth0"},
                {"dst": "fd00:2::/64", "dev": "eth0", "gateway": "x"},
                {"dst": "x", "dev": "eth0"},
                {"dst": "default", "dev": "eth0", "gateway": "x"},
                {"type": "unreachable", "dst": "fd00:3::/64", "dev": "eth0"},
                {"dst": 7, "dev": "eth0"},
                "noise",
            ]
        )
    )
    assert interface.networks == ("fd00:1::/64",)
    assert interface.default_route


@pytest.mark.parametrize("ip6", ["[", "{}", "null", '"a"', "[[]]", "[" * 100_000])
def test_an_unreadable_answer_adds_no_network(ip6: str) -> None:
    recording = Recording(files={f"{ETH}/operstate": "up\n"}, commands={IP6: ip6})
    assert interfaces_of(recording)[0].networks == ()


def test_loopback_is_left_out_and_a_virtual_interface_has_no_device() -> None:
    recording = Recording(
        links={
            "/sys/class/net/lo": "/sys/devices/virtual/net/lo",
            "/sys/class/net/docker0": "/sys/devices/virtual/net/docker0",
            "/sys/class/net/eth0": "/sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0",
            "/sys/class/net/eth0/device/driver": "/sys/bus/virtio/drivers/virtio_net",
        },
        files={"/sys/class/net/bonding_masters": "bond0\n"},
    )
    docker, eth = interfaces_of(recording)
    assert (docker.name, docker.bus_id, docker.driver) == ("docker0", None, None)
    assert (eth.name, eth.bus_id, eth.driver) == ("eth0", "0000:00:03.0", "virtio_net")


def test_an_a3_has_four_network_cards_beside_its_own() -> None:
    interfaces = interfaces_of(recorded("a3-tcpx"))
    assert [each.name for each in interfaces] == ["eth0", "eth1", "eth2", "eth3", "eth4"]
    assert {(each.driver, each.speed_bytes_per_second) for each in interfaces} == {("gve", 25e9)}
    assert [each.name for each in interfaces if each.default_route] == ["eth0"]
    assert len({each.networks for each in interfaces}) == 5


@given(st.lists(st.text(st.sampled_from("0123456789ABCDEFeth\tx\n "), max_size=60)))
def test_any_table_of_routes_gives_networks_or_nothing(rows: list[str]) -> None:
    for interface in interfaces_of(eth0(*rows)):
        assert all("/" in network for network in interface.networks)


@given(st.integers(0, 2**32 - 1), st.integers(1, 31))
def test_a_network_is_what_its_row_says(address: int, length: int) -> None:
    mask = (2**32 - 1) << (32 - length) & (2**32 - 1)

    def little_endian(number: int) -> str:
        return number.to_bytes(4, "little").hex().upper()

    network = address & mask
    row = route(little_endian(network), "0001", little_endian(mask))
    (interface,) = interfaces_of(eth0(row))
    octets = ".".join(str(octet) for octet in network.to_bytes(4, "big"))
    joins_hosts = network >> 24 != 127 and network >> 28 != 14 and network >> 16 != 0xA9FE
    if joins_hosts:
        assert interface.networks == (f"{octets}/{length}",)
    assert set(interface.networks) <= {f"{octets}/{length}"}
