"""nvidia-smi's outputs for a host that is known as NVML's data, in the form of driver 570."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from fsdpplan.topology.nvidia_smi import (
    CAPABILITY,
    LINKS,
    LIST,
    MATRIX,
    P2P_MATRIX,
    PCI_MATRIX,
    QUERY,
    REMOTES,
)

ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 5: "NS"}


def smi_outputs(nvml: Any) -> dict[str, str]:
    """Command line -> output."""
    return {
        QUERY: query(nvml),
        LIST: "".join(listed(gpu) for gpu in nvml["gpus"]),
        CAPABILITY: "".join(
            f"{gpu['index']}, {'.'.join(map(str, gpu['compute_capability']))}\n"
            for gpu in nvml["gpus"]
        ),
        MATRIX: matrix(nvml, {**pair_cells(nvml, "ancestor", ANCESTORS), **link_cells(nvml)}),
        PCI_MATRIX: matrix(nvml, pair_cells(nvml, "ancestor", ANCESTORS)),
        P2P_MATRIX: matrix(nvml, pair_cells(nvml, "p2p", P2P), tail=False),
        LINKS: by_link(nvml, speed_line),
        REMOTES: by_link(nvml, remote_line),
    }


def listed(gpu: Any) -> str:
    head = f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n"
    return head + "".join(
        f"  {mig['name']:<16} Device {place:>2}: (UUID: {mig.get('uuid', f'MIG-{place}')})\n"
        for place, mig in enumerate(gpu.get("mig_devices", ()))
    )


def query(nvml: Any) -> str:
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
        f"<nvidia_smi_log><driver_version>{nvml['driver']}</driver_version>"
        f"<cuda_version>{nvml['cuda']}</cuda_version>\n"
        + "".join(gpu_element(gpu) for gpu in nvml["gpus"])
        + "</nvidia_smi_log>\n"
    )


def gpu_element(gpu: Any) -> str:
    on = {None: "N/A", 0: "Disabled", 1: "Enabled"}
    fabric = gpu.get("fabric")
    uuid = "N/A" if fabric is None else fabric["cluster_uuid"]
    clique = "N/A" if fabric is None else fabric["clique"]
    state, status = ("N/A", "N/A") if fabric is None else ("Completed", "Success")
    migs = "".join(
        f"<mig_device><index>{place}</index><fb_memory_usage>"
        f"<total>{mig['memory_bytes'] // 2**20} MiB</total></fb_memory_usage></mig_device>"
        for place, mig in enumerate(gpu.get("mig_devices", ()))
    )
    return f"""\t<gpu id="{gpu["bus_id"]}">
\t\t<product_name>{gpu["name"]}</product_name>
\t\t<mig_mode><current_mig>{on[gpu.get("mig")]}</current_mig></mig_mode>
\t\t<mig_devices>{migs or "None"}</mig_devices>
\t\t<serial>1650522003820</serial>
\t\t<uuid>{gpu["uuid"]}</uuid>
\t\t<pci><pci_bus_id>{gpu["bus_id"]}</pci_bus_id><pci_gpu_link_info>
\t\t\t<pcie_gen><max_link_gen>{gpu["pcie_max_generation"]}</max_link_gen>
\t\t\t\t<current_link_gen>{gpu["pcie_generation"]}</current_link_gen></pcie_gen>
\t\t\t<link_widths><max_link_width>{gpu["pcie_max_width"]}x</max_link_width>
\t\t\t\t<current_link_width>{gpu["pcie_width"]}x</current_link_width></link_widths>
\t\t</pci_gpu_link_info></pci>
\t\t<fb_memory_usage><total>{gpu["memory_bytes"] // 2**20} MiB</total></fb_memory_usage>
\t\t<ecc_mode><current_ecc>{on[gpu.get("ecc")]}</current_ecc></ecc_mode>
\t\t<gpu_power_readings>
\t\t\t<current_power_limit>{gpu["power_limit_milliwatts"] / 1000:.2f} W</current_power_limit>
\t\t\t<default_power_limit>{gpu["default_power_limit_milliwatts"] / 1000:.2f} W\
</default_power_limit>
\t\t</gpu_power_readings>
\t\t<max_clocks><sm_clock>{gpu.get("max_sm_clock_megahertz", "N/A")} MHz</sm_clock>
\t\t\t<mem_clock>{gpu.get("max_memory_clock_megahertz", "N/A")} MHz</mem_clock></max_clocks>
\t\t<fabric><state>{state}</state><status>{status}</status>
\t\t\t<cliqueId>{clique}</cliqueId><clusterUuid>{uuid}</clusterUuid></fabric>
\t\t<processes><process_info><process_name>secret.py</process_name></process_info></processes>
\t</gpu>
"""


def pair_cells(nvml: Any, name: str, words: dict[int, str]) -> dict[tuple[int, int], str]:
    cells = {(pair["first"], pair["second"]): words[pair[name]] for pair in nvml["pairs"]}
    return cells | {(other, one): cell for (one, other), cell in cells.items()}


def link_cells(nvml: Any) -> dict[tuple[int, int], str]:
    """`NV18` where a GPU sees another over that many links: all of them over a switch."""
    cells: dict[tuple[int, int], str] = {}
    for gpu in nvml["gpus"]:
        up = [link for link in gpu.get("nvlinks", ()) if link["state"]]
        for other in nvml["gpus"]:
            seen = [
                link
                for link in up
                if link["remote_type"] == 2
                or link["remote_bus_id"].lower() == other["bus_id"].lower()
            ]
            if seen and other is not gpu:
                cells[gpu["index"], other["index"]] = f"NV{len(seen)}"
    return cells


def matrix(nvml: Any, cells: dict[tuple[int, int], str], *, tail: bool = True) -> str:
    gpus = [gpu["index"] for gpu in nvml["gpus"]]
    heads = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"] if tail else []
    names = [*(f"GPU{gpu}" for gpu in gpus), *(["NIC0"] if tail else [])]
    lines = ["\t".join(["\x1b[4m", *names, *heads]) + "\x1b[0m"]
    for gpu in nvml["gpus"]:
        row = [" X " if other == gpu["index"] else cells[gpu["index"], other] for other in gpus]
        end = ["SYS", cores(gpu["cpu_affinity"]), str(gpu["numa_node"]), "", "N/A"] if tail else []
        lines.append("\t".join([f"GPU{gpu['index']}", *row, *end]))
    legend = "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    nics = "\t".join(["NIC0", *(["SYS"] * len(gpus)), " X "])
    return "\n".join([*lines, *([nics] if tail else []), "", legend])


def cores(words: list[int]) -> str:
    numbers = [at for at in range(64 * len(words)) if words[at // 64] >> (at % 64) & 1]
    edges = [at for at, after in pairwise(numbers) if after != at + 1]
    starts = [numbers[0], *(numbers[numbers.index(at) + 1] for at in edges)]
    return ",".join(f"{one}-{two}" for one, two in zip(starts, [*edges, numbers[-1]], strict=True))


def by_link(nvml: Any, line: Any) -> str:
    return "".join(
        f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n"
        + "".join(line(link) for link in gpu.get("nvlinks", ()))
        for gpu in nvml["gpus"]
    )


def speed_line(link: Any) -> str:
    speed = link.get("speed_megabytes_per_second", 0) / 1000
    return f"\t Link {link['link']}: {f'{speed:.3f} GB/s' if link['state'] else '<inactive>'}\n"


def remote_line(link: Any) -> str:
    address = link.get("remote_bus_id")
    if not address or not link["state"] or not re.match("[0-9A-Fa-f]", address):
        return ""
    return f"\t Link {link['link']}: Remote Device {address}: Link {link['link']}\n"
