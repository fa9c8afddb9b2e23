"""nvidia-smi's texts, read into the form in which `topology.nvml` writes what NVML said.

The fallback where NVML is missing. A text that is cut or garbled gives less, never something else.

Source: the outputs themselves, as posted for drivers 410 to 590: `nvsmi_device_v10` to `_v13`
samples of influxdata/telegraf, matrices and link lists in issues of NVIDIA/nccl and vllm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree.ElementTree import Element

from fsdpplan.topology.distrust import pci_address
from fsdpplan.topology.smi_matrix import Matrix, read_matrix
from fsdpplan.topology.smi_xml import read_xml

QUERY = "nvidia-smi -q -x"
LIST = "nvidia-smi -L"
CAPABILITY = "nvidia-smi --query-gpu=index,compute_cap --format=csv,noheader"
MATRIX = "nvidia-smi topo -m"
PCI_MATRIX = "nvidia-smi topo -mp"
P2P_MATRIX = "nvidia-smi topo -p2p r"
LINKS = "nvidia-smi nvlink -s"
REMOTES = "nvidia-smi nvlink -R"
SMI_COMMANDS = (QUERY, LIST, CAPABILITY, MATRIX, PCI_MATRIX, P2P_MATRIX, LINKS, REMOTES)
"""What is asked, as command lines; an old driver refuses some."""

_P2P_CODES = {"OK": 0, "CNS": 1, "GNS": 2, "TNS": 3, "NS": 5}
_ANCESTOR_CODES = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50, "SOC": 50}
"""SOC is what drivers before 400 called SYS."""
_PRIVATE = "serial|processes|accounted_processes|supported_clocks"

Facts = dict[str, object]


def kept_smi_text(line: str, text: str) -> str:
    """What a recording keeps of the output of `line`: without serial numbers and the names of
    users' processes, and without the list of clocks, which is most of it."""
    if line != QUERY:
        return text
    return re.sub(rf"<({_PRIVATE})>.*?</\1>\s*", "", text, flags=re.DOTALL)


def nvidia_smi_facts(commands: Mapping[str, str]) -> Facts:
    """What the outputs in `commands` (command line -> text) say, in NVML's form."""
    root = read_xml(commands.get(QUERY, ""))
    gpus = _listed(commands.get(LIST, ""))
    by_uuid = {facts["uuid"]: index for index, facts in gpus.items()}
    for place, element in enumerate(() if root is None else root.findall("gpu")):
        index = by_uuid.get(_at(element, "uuid"), place)
        gpus[index] = gpus.get(index, {}) | _queried(element, index, gpus.get(index, {}))
    for index, capability in _capabilities(commands.get(CAPABILITY, "")).items():
        gpus.get(index, {})["compute_capability"] = capability
    _add_links(gpus, commands)
    facts = _known({"driver": _at(root, "driver_version"), "cuda": _at(root, "cuda_version")})
    return facts | {"gpus": [gpus[index] for index in sorted(gpus)], "pairs": _pairs(commands)}


def _known(facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if value is not None}


def _listed(text: str) -> dict[int, Facts]:
    """GPUs and their MIG devices of `nvidia-smi -L`."""
    gpus: dict[int, Facts] = {}
    mig_devices: list[Facts] = []
    for line in text.splitlines():
        gpu = re.fullmatch(r"GPU ([0-9]{1,4}): (\S.*) \(UUID: (GPU-[^\s()]+)\)\s*", line)
        mig = re.fullmatch(
            r"\s+(MIG \S+)\s+Device\s+([0-9]{1,3}): \(UUID: (MIG-[^\s()]+)\)\s*", line
        )
        if gpu is not None:
            mig_devices = []
            index = int(gpu[1])
            gpus[index] = {"index": index, "name": gpu[2], "uuid": gpu[3]}
            gpus[index]["mig_devices"] = mig_devices
        elif mig is not None and int(mig[2]) < len(mig_devices):
            mig_devices = []  # the heading of another GPU is missing
        elif mig is not None:
            mig_devices.append({"device": int(mig[2]), "name": mig[1], "uuid": mig[3]})
    return gpus


def _queried(gpu: Element, index: int, listed: Facts) -> Facts:
    """One GPU of `nvidia-smi -q -x`."""
    link = "pci/pci_gpu_link_info"
    return _known(
        {
            "index": index,
            "name": _at(gpu, "product_name"),
            "uuid": _at(gpu, "uuid"),
            "bus_id": _at(gpu, "pci/pci_bus_id") or gpu.get("id"),
            "memory_bytes": _mebibytes(gpu),
            "power_limit_milliwatts": _milliwatts(
                gpu, "gpu_power_readings/current_power_limit", "power_readings/power_limit"
            ),
            "default_power_limit_milliwatts": _milliwatts(
                gpu, "gpu_power_readings/default_power_limit", "power_readings/default_power_limit"
            ),
            "max_sm_clock_megahertz": _whole(gpu, "max_clocks/sm_clock", " MHz"),
            "max_memory_clock_megahertz": _whole(gpu, "max_clocks/mem_clock", " MHz"),
            "ecc": _on(gpu, "ecc_mode/current_ecc"),
            "mig": _on(gpu, "mig_mode/current_mig"),
            "mig_devices": _mig_devices(gpu, listed),
            "pcie_generation": _whole(gpu, f"{link}/pcie_gen/current_link_gen"),
            "pcie_width": _whole(gpu, f"{link}/link_widths/current_link_width", "x"),
            "pcie_max_generation": _whole(gpu, f"{link}/pcie_gen/max_link_gen"),
            "pcie_max_width": _whole(gpu, f"{link}/link_widths/max_link_width", "x"),
            "fabric": _fabric(gpu),
        }
    )


def _at(element: Element | None, path: str) -> str | None:
    """The text at a path; None for what nvidia-smi writes where it knows none."""
    text = (None if element is None else element.findtext(path)) or ""
    unknown = ("N/A", "[", "ERR!", "Unknown", "Not Found", "Requested functionality")
    return text.strip() or None if not text.strip().startswith(unknown) else None


def _whole(element: Element, path: str, unit: str = "") -> int | None:
    match = re.fullmatch(rf"([0-9]{{1,9}}){unit}", _at(element, path) or "")
    return None if match is None else int(match[1])


def _mebibytes(element: Element) -> int | None:
    total = _whole(element, "fb_memory_usage/total", " MiB")
    return None if total is None else total * 2**20


def _milliwatts(element: Element, *paths: str) -> int | None:
    """The number at the first path that has one: the names changed with driver 530."""
    for path in paths:
        match = re.fullmatch(r"([0-9]{1,6}\.[0-9]{1,3}) W", _at(element, path) or "")
        if match is not None:
            return round(float(match[1]) * 1000)
    return None


def _on(element: Element, path: str) -> int | None:
    return {"Enabled": 1, "Disabled": 0}.get(_at(element, path) or "")


def _mig_devices(gpu: Element, listed: Facts) -> list[Facts]:
    """The MIG devices of `-L`, with the memory that the query has under the same number."""
    memory = {_whole(each, "index"): _mebibytes(each) for each in gpu.iter("mig_device")}
    named = listed.get("mig_devices")
    return [
        _known(
            {
                "name": each["name"],
                "uuid": each["uuid"],
                "memory_bytes": memory.get(each["device"]),
            }
        )
        for each in (named if isinstance(named, list) else [])
    ]


def _fabric(gpu: Element) -> Facts | None:
    """Its codes are NVML's: 3 is Completed, 0 is Success."""
    if _at(gpu, "fabric/state") != "Completed" or _at(gpu, "fabric/status") != "Success":
        return None
    uuid, clique = _at(gpu, "fabric/clusteruuid"), _whole(gpu, "fabric/cliqueid")
    return _known({"cluster_uuid": uuid, "clique": clique, "state": 3, "status": 0})


def _capabilities(text: str) -> dict[int, list[int]]:
    lines = (re.fullmatch(r"([0-9]{1,4}), ([0-9]{1,2})\.([0-9])", each) for each in _lines(text))
    return {int(each[1]): [int(each[2]), int(each[3])] for each in lines if each is not None}


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def _add_links(gpus: dict[int, Facts], commands: Mapping[str, str]) -> None:
    """NVLinks, near cores and the NUMA node of each GPU."""
    matrix = read_matrix(commands.get(MATRIX, ""))
    speeds = _by_link(commands.get(LINKS, ""), r"([0-9]{1,4}\.[0-9]{1,3}) GB/s|<inactive>")
    remotes = _by_link(commands.get(REMOTES, ""), r"Remote Device ([0-9A-Fa-f:.]+): Link [0-9]+")
    bus_ids = {index: pci_address(str(facts.get("bus_id"))) for index, facts in gpus.items()}
    for index, facts in gpus.items():
        links = [
            _link(link, speed, remotes.get(index, {}).get(link))
            for link, speed in sorted(speeds.get(index, {}).items())
        ]
        _add_far_ends(links, index, matrix, bus_ids)
        facts["nvlinks"] = links
        facts |= _known(
            {
                "cpu_affinity": matrix.cpu_affinity.get(index),
                "numa_node": matrix.numa_node.get(index),
            }
        )


def _by_link(text: str, value: str) -> dict[int, dict[int, str | None]]:
    """GPU -> link -> the group of `value` in the line of the link (None: it has none)."""
    found: dict[int, dict[int, str | None]] = {}
    links: dict[int, str | None] = {}
    for line in _lines(text):
        gpu = re.match(r"GPU ([0-9]{1,4}):", line)
        link = re.fullmatch(rf"Link ([0-9]{{1,2}}): (?:{value})", line)
        if gpu is not None:
            links = found.setdefault(int(gpu[1]), {})
        elif link is not None and int(link[1]) in links:
            links = {}  # the heading of another GPU is missing
        elif link is not None:
            links[int(link[1])] = link[2]
    return found


def _link(link: int, speed: str | None, remote: str | None) -> Facts:
    megabytes = None if speed is None else round(float(speed) * 1000)
    return _known(
        {
            "link": link,
            "state": 0 if speed is None else 1,
            "speed_megabytes_per_second": megabytes,
            "remote_bus_id": remote,
        }
    )


def _add_far_ends(
    links: list[Facts], index: int, matrix: Matrix, bus_ids: Mapping[int, str | None]
) -> None:
    """What is at the far end, where it follows from the matrix.

    All links lead to switches when each peer sees all of them (of direct links each has a part);
    with one peer alone, only when the far end is known to be no GPU. They lead to one GPU when it
    sees all of them and another GPU sees none.
    """
    active = [facts for facts in links if facts["state"] == 1]
    peers = {other: cell for (one, other), cell in matrix.cells.items() if one == index != other}
    full = [peer for peer, cell in peers.items() if active and cell == f"NV{len(active)}"]
    linked = [peer for peer, cell in peers.items() if cell.startswith("NV")]
    for facts in active:
        address = pci_address(str(facts.get("remote_bus_id")))
        elsewhere = address is not None and address not in bus_ids.values()
        if address is not None and not elsewhere:
            facts["remote_type"] = 0
        elif len(full) == len(peers) and (len(full) > 1 or (full and elsewhere)):
            facts["remote_type"] = 2
        elif len(peers) > 1 and linked == full and len(full) == 1 and address is None:
            facts |= _known({"remote_type": 0, "remote_bus_id": bus_ids.get(full[0])})


def _pairs(commands: Mapping[str, str]) -> list[Facts]:
    """P2P status and nearest ancestor; where NVLink hides the ancestor, the matrix of PCIe alone
    has it."""
    p2p = read_matrix(commands.get(P2P_MATRIX, "")).cells
    pci = read_matrix(commands.get(PCI_MATRIX, "")).cells
    any_way = read_matrix(commands.get(MATRIX, "")).cells
    keys = sorted({(one, other) for one, other in (*p2p, *pci, *any_way) if one < other})
    return [
        {"first": one, "second": other}
        | _known(
            {
                "p2p": _P2P_CODES.get(p2p.get((one, other), "")),
                "ancestor": _ANCESTOR_CODES.get(
                    pci.get((one, other)) or any_way.get((one, other), "")
                ),
            }
        )
        for one, other in keys
    ]
