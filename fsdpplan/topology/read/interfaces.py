"""Interfaces: the kernel's network interfaces and the networks behind them.

The networks are read off the routing tables, which hold no address of this host: an interface has
an address in each network that it reaches without a gateway.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fsdpplan.spec.machine import Interface
from fsdpplan.topology.read.pci import bus_id_in
from fsdpplan.topology.read.reading import first_line, is_name, whole_number
from fsdpplan.topology.read.recording import Recording

_CLASS = "/sys/class/net"
_GATEWAY, _REJECT = 0x2, 0x200
"""Flags of a route. Source: Linux, include/uapi/linux/route.h."""
_MAX_MEGABITS_PER_SECOND = 10**7
"""Drivers that do not know their speed say -1, some as an unsigned number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One row of a routing table."""

    interface: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    direct: bool
    """No gateway stands between."""


def interfaces_of(recording: Recording) -> tuple[Interface, ...]:
    """All interfaces but loopback, by name."""
    routes = tuple(routes_of(recording))
    return tuple(
        _interface(recording, name, routes)
        for name in filter(is_name, recording.children(_CLASS))
        if name not in ("lo", "bonding_masters")
    )


def _interface(recording: Recording, name: str, routes: tuple[Route, ...]) -> Interface:
    folder = f"{_CLASS}/{name}"
    own = [route for route in routes if route.interface == name]
    device = recording.link(f"{folder}/device") or recording.link(folder)
    return Interface(
        name=name,
        up=_up(recording.text(f"{folder}/operstate")),
        speed_bytes_per_second=_speed_bytes_per_second(recording.text(f"{folder}/speed")),
        driver=first_line((recording.link(f"{folder}/device/driver") or "").rpartition("/")[2]),
        bus_id=bus_id_in(device),
        numa_node=whole_number(recording.text(f"{folder}/device/numa_node")),
        networks=tuple(
            sorted({str(route.network) for route in own if route.direct and _joins_hosts(route)})
        ),
        default_route=any(route.network.prefixlen == 0 for route in own),
    )


def _up(text: str | None) -> bool | None:
    """Source: Linux, Documentation/networking/operstates.rst; `unknown` is said by drivers that do
    not tell."""
    match text:
        case "up":
            return True
        case "down" | "lowerlayerdown" | "notpresent" | "dormant" | "testing":
            return False
    return None


def _speed_bytes_per_second(text: str | None) -> float | None:
    """The file counts megabits per second."""
    megabits = whole_number(text)
    if not megabits or megabits > _MAX_MEGABITS_PER_SECOND:
        return None
    return megabits * 1e6 / 8


def _joins_hosts(route: Route) -> bool:
    """The network can lead to other hosts: not a route to one address, not link-local."""
    network = route.network
    return 0 < network.prefixlen < network.max_prefixlen and not (
        network.is_link_local or network.is_multicast or network.is_loopback
    )


def routes_of(recording: Recording) -> Iterator[Route]:
    """Routes of the main table: IPv4 from /proc/net/route, IPv6 from `ip -json -6 route`."""
    for line in (recording.text("/proc/net/route") or "").splitlines():
        route = _ipv4_route(line.split())
        if route is not None:
            yield route
    for command, text in recording.commands.items():
        if command.startswith("ip ") and " -6 " in command and " route" in command:
            yield from _ipv6_routes(text)


def _ipv4_route(columns: list[str]) -> Route | None:
    """A row `eth0 000010AC 0100000A 0003 ...`: interface, destination, gateway, flags and, eighth,
    the mask; addresses are numbers of a little-endian host."""
    if len(columns) < 8:
        return None
    interface, destination, _, flags, *_ = columns
    if not re.fullmatch(
        r"[0-9A-F]{8} [0-9A-F]{4} [0-9A-F]{8}", f"{destination} {flags} {columns[7]}"
    ):
        return None
    if int(flags, 16) & _REJECT:
        return None
    address, mask = (bytes.fromhex(word)[::-1] for word in (destination, columns[7]))
    try:
        network = ipaddress.IPv4Network((address, str(ipaddress.IPv4Address(mask))))
    except ValueError:
        return None
    return Route(interface=interface, network=network, direct=not int(flags, 16) & _GATEWAY)


def _ipv6_routes(text: str) -> Iterator[Route]:
    """The rows of `ip -json -6 route show table main`."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict) or row.get("type", "unicast") != "unicast":
            continue
        interface, destination = row.get("dev"), row.get("dst")
        if not isinstance(interface, str) or not isinstance(destination, str):
            continue
        try:
            network = ipaddress.IPv6Network("::/0" if destination == "default" else destination)
        except ValueError:
            continue
        yield Route(interface=interface, network=network, direct="gateway" not in row)
