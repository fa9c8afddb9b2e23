"""Adapters: the ports of InfiniBand, RoCE and EFA devices, from /sys/class/infiniband.

Source of the formats: Linux, drivers/infiniband/core/sysfs.c.
"""

from __future__ import annotations

import re

from fsdpplan.spec.machine import Gid, LinkLayer, Nic, PortState
from fsdpplan.topology.read.pci import bus_id_in, pci_link_of
from fsdpplan.topology.read.reading import first_line, is_name, whole_number
from fsdpplan.topology.read.recording import Recording, gid_form

_CLASS = "/sys/class/infiniband"
_AMAZON = "0x1d0f"
_STATES: dict[str, PortState] = {
    "DOWN": "down",
    "INIT": "init",
    "ARMED": "armed",
    "ACTIVE": "active",
}
_GID_FORMS = ("::ffff:x.x.x.x", "fe80::x", "x::x")


def nics_of(recording: Recording) -> tuple[Nic, ...]:
    """All ports of all adapters, in the order of their names."""
    return tuple(
        _nic(recording, name, int(port))
        for name in sorted(filter(is_name, recording.children(_CLASS)), key=_by_number)
        for port in sorted(recording.children(f"{_CLASS}/{name}/ports"), key=_by_number)
        if re.fullmatch(r"[1-9][0-9]{0,2}", port)
    )


def _nic(recording: Recording, name: str, port: int) -> Nic:
    device, folder = f"{_CLASS}/{name}/device", f"{_CLASS}/{name}/ports/{port}"
    state = _state(recording, folder)
    link = pci_link_of(recording, device)
    gids = _gids(recording, folder)
    return Nic(
        name=name,
        port=port,
        link_layer=_link_layer(recording, name, port),
        state=state,
        rate_bytes_per_second=_rate_bytes_per_second(recording.text(f"{folder}/rate"), state),
        firmware=first_line(recording.text(f"{_CLASS}/{name}/fw_ver")),
        bus_id=bus_id_in(recording.link(device)),
        pcie_generation=link.generation,
        pcie_width=link.width,
        pcie_max_generation=link.max_generation,
        pcie_max_width=link.max_width,
        numa_node=whole_number(recording.text(f"{device}/numa_node")),
        interface=_interface(recording, name, port, gids),
        gids=gids,
        virtual_function=_virtual_function(recording, device),
    )


def _by_number(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts `mlx5_2` before `mlx5_10`."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple(
        (0, int(part), "") if part.isascii() and part.isdecimal() else (1, 0, part)
        for part in parts
    )


def _state(recording: Recording, folder: str) -> PortState | None:
    """Logical state, as in `4: ACTIVE`; where that is not said, a link without light is down."""
    text = recording.text(f"{folder}/state")
    if text is not None:
        return _STATES.get(text.partition(":")[2].strip())
    physical = (recording.text(f"{folder}/phys_state") or "").partition(":")[2].strip()
    return "down" if physical in ("Sleep", "Polling", "Disabled") else None


def _rate_bytes_per_second(text: str | None, state: PortState | None) -> float | None:
    """The rate in `400 Gb/sec (4X NDR)`.

    A port that is down has negotiated none: the kernel then prints the least rate there is.
    """
    match = re.match(r"([0-9]{1,5}(?:\.[0-9])?) Gb/sec\b", text or "")
    if match is None or state == "down":
        return None
    return float(match[1]) * 1e9 / 8 or None


def _link_layer(recording: Recording, name: str, port: int) -> LinkLayer | None:
    """What the port speaks. EFA has a layer of its own, which the kernel does not name: there it is
    the driver, or Amazon as vendor, that tells."""
    text = recording.text(f"{_CLASS}/{name}/ports/{port}/link_layer")
    match text:
        case "InfiniBand":
            return "infiniband"
        case "Ethernet":
            return "ethernet"
        case "Unspecified" | "Unknown":
            return "efa" if _is_efa(recording, name) else "unspecified"
    return None


def _is_efa(recording: Recording, name: str) -> bool:
    device = f"{_CLASS}/{name}/device"
    driver = (recording.link(f"{device}/driver") or "").rpartition("/")[2]
    vendor = recording.text(f"/sys/bus/pci/devices/{bus_id_in(recording.link(device))}/vendor")
    return driver == "efa" or vendor == _AMAZON


def _gids(recording: Recording, folder: str) -> tuple[Gid, ...]:
    """The entries that are in use and whose kind is known."""
    found: list[Gid] = []
    for entry in sorted(recording.children(f"{folder}/gids"), key=_by_number):
        index = whole_number(entry)
        form = gid_form(recording.text(f"{folder}/gids/{entry}") or "")
        kind = recording.text(f"{folder}/gid_attrs/types/{entry}")
        if index is not None and form in _GID_FORMS and kind in ("IB/RoCE v1", "RoCE v2"):
            interface = first_line(recording.text(f"{folder}/gid_attrs/ndevs/{entry}"))
            found.append(Gid(index=index, kind=kind, gid=form, interface=interface))
    return tuple(found)


def _interface(recording: Recording, name: str, port: int, gids: tuple[Gid, ...]) -> str | None:
    """The interface of the first GID, which for a bond is the bond's; else that of the device (of a
    bond: one of its members).

    A device with two ports has two: `dev_port` counts them from 0.
    """
    named = [gid.interface for gid in gids if gid.interface is not None]
    if named or "bond" in name:
        return named[0] if named else None
    below = tuple(filter(is_name, recording.children(f"{_CLASS}/{name}/device/net")))
    if len(below) == 1:
        return below[0]
    numbered = [
        each
        for each in below
        if whole_number(recording.text(f"/sys/class/net/{each}/dev_port")) == port - 1
    ]
    return numbered[0] if len(numbered) == 1 else None


def _virtual_function(recording: Recording, device: str) -> bool | None:
    """A function names the physical one that it belongs to, and only that one counts functions.
    Inside of a virtual machine neither need show."""
    if recording.link(f"{device}/physfn") is not None:
        return True
    return None if recording.text(f"{device}/sriov_totalvfs") is None else False
