"""Places: what is asked of a host, and that no address is kept."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.topology.read.recording import (
    COMMANDS,
    FILES,
    LINKS,
    commands_for,
    gid_form,
    kept_text,
)

IPV4 = "0000:0000:0000:0000:0000:ffff:0a01:0203"
LINK_LOCAL = "fe80:0000:0000:0000:ba3f:d2ff:fe12:3456"


def test_only_absolute_places_are_read_and_none_holds_secrets() -> None:
    assert all(place.startswith("/") for place in (*FILES, *LINKS))
    assert not [
        place for place in (*FILES, *LINKS) if re.search("secret|environ|key|/home|/etc", place)
    ]


def test_slurm_is_asked_about_this_node_by_its_name_there() -> None:
    inside = commands_for(hostname="n1.example", environment={"SLURMD_NODENAME": "gpu-001"})
    outside = commands_for(hostname="n1.example", environment={})
    assert inside[-1] == ("scontrol", "show", "node", "gpu-001")
    assert outside[-1] == ("scontrol", "show", "node", "n1")


@pytest.mark.parametrize("hostname", ["", "-x", "a b", "$(id)", "a\nb"])
def test_a_hostile_name_is_not_asked_about(hostname: str) -> None:
    assert commands_for(hostname=hostname, environment={}) == COMMANDS


@pytest.mark.parametrize(
    ("gid", "form"),
    [
        (IPV4 + "\n", "::ffff:x.x.x.x"),
        (LINK_LOCAL, "fe80::x"),
        ("fec0:0000:0000:0001:ba3f:d2ff:fe12:3456", "x::x"),
        ("0000:0000:0000:0000:0000:0000:0000:0000", "::"),
        ("fe80:0000:0000:0000:0000:0000:0000:0000", "::"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_gid_keeps_its_kind_and_loses_its_address(gid: str, form: str) -> None:
    assert gid_form(gid) == form
    assert gid_form(form) == form


ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth0\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    "eth0\t0102000A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n"
    "eth0\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
)
IPV6_ROUTES = (
    '[{"dst":"2600:1f18::5","dev":"eth0","protocol":"kernel","metric":256,"flags":[]},'
    '{"dst":"2600:1f18::/64","dev":"eth0","prefsrc":"2600:1f18::5","flags":[]},'
    '{"dst":"default","gateway":"fe80::1","dev":"eth0","flags":[]},'
    '{"dst":"fd00::/48","via":{"family":"inet6","host":"fe80::2"},"dev":"eth0","flags":[]}]'
)
NODE = (
    "NodeName=n1 Arch=x86_64\n   Gres=gpu:h100:8(S:0-1)\n   NodeAddr=10.0.2.1 NodeHostName=n1\n"
    "   OS=Linux 5.15.0\n   State=IDLE Partitions=batch,debug\n   Reason=bad fan [ops@10.0.2.9]\n"
)
BRIDGES = (
    "0000:17:00.0 PCI bridge: Broadcom PEX89 (prog-if 00 [Normal decode])\n\tFlags: bus master\n"
    "\tMemory at 10.0.2.1\n\tCapabilities: [148] Access Control Services\n"
    "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+\n"
)


@pytest.mark.parametrize(
    ("source", "text", "address"),
    [
        ("/sys/class/infiniband/mlx5_0/ports/1/gids/3", IPV4, "0a01"),
        ("/proc/net/route", ROUTES, "0102000A"),
        ("ip -json -6 route show table main", IPV6_ROUTES, r"::5|::1|::2"),
        ("scontrol show node n1", NODE, r"10\.0\.2"),
        ("lspci -D -vvv -d ::0604", BRIDGES, r"10\.0\.2"),
        ("/proc/cmdline", "ip=10.0.2.1 intel_iommu=on token=abc", r"10\.0|abc"),
    ],
)
def test_no_address_is_kept(source: str, text: str, address: str) -> None:
    kept = kept_text(source, text)
    assert re.search(address, text)
    assert not re.search(address, kept)
    assert kept_text(source, kept) == kept


def test_what_the_parsers_need_is_kept() -> None:
    assert kept_text("/proc/cmdline", "ro iommu=pt quiet") == "iommu=pt\n"
    assert "Gres=gpu:h100:8(S:0-1)" in kept_text("scontrol show node n1", NODE)
    assert "SrcValid+" in kept_text("lspci -D -vvv -d ::0604", BRIDGES)
    assert "0002000A" in kept_text("/proc/net/route", ROUTES)
    assert '"2600:1f18::/64"' in kept_text("ip -json -6 route show table main", IPV6_ROUTES)
    cpuinfo = "processor\t: 0\nmodel name\t: Xeon\n" * 300
    assert kept_text("/proc/cpuinfo", cpuinfo) == "model name\t: Xeon\n"
    assert kept_text("/proc/1/cgroup", "1:cpu:/\n0::/user.slice/me\n") == ""
    assert kept_text("/proc/sys/kernel/hostname", "n1\n") == "n1\n"


@given(
    st.text(string.printable),
    st.sampled_from(["/proc/net/route", "ip -json -6 route", "/x/gids/0"]),
)
def test_keeping_twice_is_keeping_once(text: str, source: str) -> None:
    kept = kept_text(source, text)
    assert kept_text(source, kept) == kept
