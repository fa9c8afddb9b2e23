"""The topology that NCCL writes where NCCL_TOPO_DUMP_FILE says, as a part of a recording.

Source: NCCL 2.30.7 src/graph/xml.cc: one `cpu` a NUMA node; `pci` elements nested as the PCIe
switches are, where the elements between two switches are one; below them `gpu` with its `nvlink`
elements, and `nic` with a `net` for each port, whose `speed` counts Mb/s.

The file may be anybody's: entities are refused before anything is parsed, and depth is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.etree.ElementTree import ParseError, XMLParser

from fsdpplan.errors import SpecError
from fsdpplan.topology.read.gpu_names import UNKNOWN_NVLINK, gpu_facts, name_of_pci
from fsdpplan.topology.read.reading import is_name, whole_number
from fsdpplan.topology.read.recording import Recording

MOST_DEPTH = 64
MOST_ELEMENTS = 20_000
MOST_NVLINKS = 72
"""Of one element; a GPU has 18."""

_BEGINS = re.compile(r"<system[\s>]")
_ENDS = "</system>"
_FORBIDDEN = re.compile(r"<!\s*(DOCTYPE|ENTITY|ELEMENT|ATTLIST|NOTATION)", re.IGNORECASE)
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SWITCH_CLASS = "0x0680"
"""PCI class of an NVSwitch; of a GPU at the other end 0x03."""
_AMAZON = "0x1d0f"
_GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""GT/s of a lane and PCIe generation."""
_LINK_LAYERS = {"0x0207": "InfiniBand", "0x0200": "Ethernet"}
"""PCI class -> what the kernel says of the port."""


def has_topology(text: str) -> bool:
    """Whether such a topology begins in the text."""
    return _BEGINS.search(text) is not None


def topology_recording(text: str, names: Mapping[int, str]) -> Recording | None:
    """What NCCL's topology in `text` says of its host; None where there is none.

    `names`: GPU -> its name, said elsewhere. Raises SpecError, by line, for what is no such file.
    """
    begins = _BEGINS.search(text)
    if begins is None:
        return None
    forbidden = _FORBIDDEN.search(text)
    if forbidden is not None:
        raise SpecError(
            f"line {text.count(chr(10), 0, forbidden.start()) + 1}: XML with <!{forbidden[1]}, "
            "which NCCL never writes, is not read: give the file that it dumped"
        )
    above = text.count("\n", 0, begins.start())
    ends = text.find(_ENDS, begins.start())
    target = _Target(names=names)
    parser = XMLParser(target=target)
    try:
        parser.feed(text[begins.start() : None if ends < 0 else ends + len(_ENDS)])
        parser.close()
    except ParseError as error:
        raise SpecError(
            f"line {above + error.position[0]}: NCCL's topology breaks off here, as if it was cut "
            f"({error.msg.partition(':')[0]}): dump it again with NCCL_TOPO_DUMP_FILE"
        ) from error
    return target.recording()


@dataclass(slots=True, kw_only=True)
class _Target:
    """What the parser calls; it keeps the way down to the element that is open."""

    names: Mapping[int, str]
    open: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    gpus: dict[str, dict[str, object]] = field(default_factory=dict)
    """By PCI address."""
    graphics: list[str] = field(default_factory=list)
    """Addresses of `pci` elements with a GPU's class, in a file without `gpu` elements."""
    hosts: set[str] = field(default_factory=set)
    elements: int = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if len(self.open) >= MOST_DEPTH or self.elements > MOST_ELEMENTS:
            raise SpecError(
                f"NCCL's topology nests at most {MOST_DEPTH} elements and has at most "
                f"{MOST_ELEMENTS}; give the file that NCCL dumped"
            )
        self.open.append((tag, attributes))
        match tag:
            case "cpu":
                self.hosts.add(attributes.get("host_hash", ""))
            case "pci":
                self._pci(attributes)
            case "gpu":
                self._gpu(attributes)
            case "nvlink":
                self._nvlink(attributes)
            case "net":
                self._net(attributes)

    def end(self, tag: str) -> None:
        self.open.pop()

    def data(self, text: str) -> None:
        """Text between elements means nothing."""

    def close(self) -> None:
        """Called at the end of the document."""

    def recording(self) -> Recording:
        if len(self.hosts) > 1:
            raise SpecError(
                f"NCCL's topology has the CPUs of {len(self.hosts)} hosts (an NVLink domain that "
                "spans hosts): dump it in a job on one of them"
            )
        gpus = list(self.gpus.values()) or [
            {**gpu_facts(i, self.names.get(i)), "bus_id": address}
            for i, address in enumerate(self.graphics)
        ]
        return Recording(
            files=self.files,
            links=self.links,
            nvml={"gpus": gpus, "pairs": []},
            failed={
                "other GPUs": "NCCL's topology has those of the job that wrote it, here "
                f"{len(gpus)}",
                "PCIe lanes now": "NCCL's topology has the most that GPU and slot can do",
            },
        )

    def _pci(self, attributes: Mapping[str, str]) -> None:
        address = self._address()
        if address is None:
            return
        folder = f"/sys/bus/pci/devices/{address}"
        numa_node = self._numa_node()
        kind = attributes.get("class", "").lower()
        if kind.startswith(("0x02", "0x03", "0x12")):
            self.links[folder] = self._way()
            self.files[f"{folder}/vendor"] = attributes.get("vendor", "")
            if numa_node is not None:
                self.files[f"{folder}/numa_node"] = f"{numa_node}"
        if kind.startswith("0x03"):
            self.graphics.append(address)

    def _gpu(self, attributes: Mapping[str, str]) -> None:
        address, index = self._address(), whole_number(attributes.get("dev"))
        pci = self._pci_attributes()
        if address is None or index is None:
            return
        name = self.names.get(index) or name_of_pci(pci.get("vendor"), pci.get("device"))
        sm = whole_number(attributes.get("sm"))
        # NCCL reads max_link_speed and max_link_width, of the device or of the port above it
        generation = _GENERATIONS.get(
            pci.get("link_speed", "").partition(" ")[0].removesuffix(".0")
        )
        width = whole_number(pci.get("link_width"))
        lanes = (
            {
                "generation": generation,
                "width": width,
                "max_generation": generation,
                "max_width": width,
            }
            if generation and width
            else {}
        )
        self.gpus[address] = {
            **gpu_facts(index, name),
            **({} if not sm else {"compute_capability": [sm // 10, sm % 10]}),
            "bus_id": address,
            **{f"pcie_{each}": value for each, value in lanes.items()},
            "nvlinks": [],
        }

    def _nvlink(self, attributes: Mapping[str, str]) -> None:
        count = whole_number(attributes.get("count"))
        address = self._address()
        if address not in self.gpus or count is None or count > MOST_NVLINKS:
            return
        links = self.gpus[address]["nvlinks"]
        assert isinstance(links, list)
        target = attributes.get("target", "").lower()
        kind = attributes.get("tclass", "").lower()
        end: dict[str, object] = {"remote_type": 2} if kind.startswith(_SWITCH_CLASS) else {}
        if kind.startswith("0x03") and _ADDRESS.fullmatch(target):
            end = {"remote_type": 0, "remote_bus_id": target}
        first = len(links)
        links += [
            {"link": first + link, "state": 1, "version": UNKNOWN_NVLINK, **end}
            for link in range(count)
        ]

    def _net(self, attributes: Mapping[str, str]) -> None:
        name = attributes.get("name", "")
        megabits = whole_number(attributes.get("speed"))
        port = whole_number(attributes.get("port"))
        if not is_name(name):
            return
        pci = self._pci_attributes()
        if not port and pci.get("vendor", "").lower() != _AMAZON:
            self.files[f"/sys/class/net/{name}/operstate"] = "up"
            if megabits:
                self.files[f"/sys/class/net/{name}/speed"] = f"{megabits}"
            return
        device = f"/sys/class/infiniband/{name}"
        here = f"{device}/ports/{port or 1}"
        layer = _LINK_LAYERS.get(pci.get("class", "").lower()[:6], "")
        if pci.get("vendor", "").lower() == _AMAZON:
            layer = "Unspecified"
        # NCCL lists ports that are active only (net_ib.cc, ncclIbInit)
        self.files |= {f"{here}/state": "4: ACTIVE", f"{here}/link_layer": layer}
        if megabits:
            self.files[f"{here}/rate"] = f"{megabits / 1000:g} Gb/sec"
        if self._address() is not None:
            self.links[f"{device}/device"] = self._way()
        if (numa_node := self._numa_node()) is not None:
            self.files[f"{device}/device/numa_node"] = f"{numa_node}"

    def _addresses(self) -> list[str]:
        found = [
            attributes.get("busid", "").lower() for tag, attributes in self.open if tag == "pci"
        ]
        return found if all(map(_ADDRESS.fullmatch, found)) else []

    def _address(self) -> str | None:
        """Of the innermost PCI device that is open."""
        addresses = self._addresses()
        return addresses[-1] if addresses else None

    def _way(self) -> str:
        """As a real path. NCCL joins the two bridges of a switch, so each stands twice; host
        bridges are not in it, and each first device is taken to have its own."""
        *switches, device = self._addresses()
        top = (switches or [device])[0].rpartition(":")[0]
        ways = [each for switch in switches for each in (switch, switch)]
        return "/".join(["/sys/devices", f"pci{top}", *ways, device])

    def _pci_attributes(self) -> Mapping[str, str]:
        return next((each for tag, each in reversed(self.open) if tag == "pci"), {})

    def _numa_node(self) -> int | None:
        cpu = next((each for tag, each in reversed(self.open) if tag == "cpu"), {})
        return whole_number(cpu.get("numaid"))
