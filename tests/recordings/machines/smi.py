"""What nvidia-smi prints of a tree's GPUs, for hosts without NVML.

Forms: samples of `nvidia-smi -q -x` in influxdata/telegraf, matrices and link lists in issues of
NVIDIA/nccl. Of the XML only what is read is written.
"""

from __future__ import annotations

from typing import Any

from tests.recordings.machines.tree import Tree, ancestor

_WAYS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def move_to_nvidia_smi(tree: Tree, *, adapters: list[tuple[str, str, int]]) -> None:
    """Says in nvidia-smi's texts what NVML would have said; `adapters` as (name, chain, NUMA)."""
    links = [f"NV{len(gpu['nvlinks'])}" for gpu in tree.gpus]
    tree.commands |= {
        "nvidia-smi -q -x": _query(tree),
        "nvidia-smi -L": "".join(f"{_heading(gpu)}\n" for gpu in tree.gpus),
        "nvidia-smi --query-gpu=index,compute_cap --format=csv,noheader": "".join(
            f"{gpu['index']}, {'.'.join(map(str, gpu['compute_capability']))}\n"
            for gpu in tree.gpus
        ),
        "nvidia-smi nvlink -s": "".join(_link_speeds(gpu) for gpu in tree.gpus),
        "nvidia-smi nvlink -R": "".join(_link_remotes(gpu) for gpu in tree.gpus),
        "nvidia-smi topo -m": _matrix(tree, adapters, links=links),
        "nvidia-smi topo -mp": _matrix(tree, adapters, links=None),
        "nvidia-smi topo -p2p r": _p2p_matrix(len(tree.gpus)),
    }


def _heading(gpu: dict[str, Any]) -> str:
    return f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})"


def _link_speeds(gpu: dict[str, Any]) -> str:
    lines = [
        f"\t Link {link['link']}: {link['speed_megabytes_per_second'] / 1000:.3f} GB/s"
        for link in gpu["nvlinks"]
    ]
    return "\n".join([_heading(gpu), *lines]) + "\n"


def _link_remotes(gpu: dict[str, Any]) -> str:
    lines = [
        f"\t Link {link['link']}: Remote Device {link['remote_bus_id']}: Link {link['link'] + 30}"
        for link in gpu["nvlinks"]
    ]
    return "\n".join([_heading(gpu), *lines]) + "\n"


def _query(tree: Tree) -> str:
    gpus = "".join(_gpu_xml(gpu) for gpu in tree.gpus)
    return (
        '<?xml version="1.0" ?>\n'
        '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
        "<nvidia_smi_log>\n"
        f"\t<driver_version>{tree.driver}</driver_version>\n"
        f"\t<cuda_version>{tree.cuda}</cuda_version>\n"
        f"\t<attached_gpus>{len(tree.gpus)}</attached_gpus>\n"
        f"{gpus}</nvidia_smi_log>\n"
    )


def _gpu_xml(gpu: dict[str, Any]) -> str:
    return (
        f'\t<gpu id="{gpu["bus_id"]}">\n'
        f"\t\t<product_name>{gpu['name']}</product_name>\n"
        "\t\t<mig_mode><current_mig>Disabled</current_mig></mig_mode>\n"
        f"\t\t<uuid>{gpu['uuid']}</uuid>\n"
        "\t\t<pci>\n"
        f"\t\t\t<pci_bus_id>{gpu['bus_id']}</pci_bus_id>\n"
        "\t\t\t<pci_gpu_link_info>\n"
        f"\t\t\t\t<pcie_gen><max_link_gen>{gpu['pcie_max_generation']}</max_link_gen>"
        f"<current_link_gen>{gpu['pcie_generation']}</current_link_gen></pcie_gen>\n"
        f"\t\t\t\t<link_widths><max_link_width>{gpu['pcie_max_width']}x</max_link_width>"
        f"<current_link_width>{gpu['pcie_width']}x</current_link_width></link_widths>\n"
        "\t\t\t</pci_gpu_link_info>\n"
        "\t\t</pci>\n"
        f"\t\t<fb_memory_usage><total>{gpu['memory_bytes'] // 2**20} MiB</total>"
        "</fb_memory_usage>\n"
        "\t\t<ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>\n"
        "\t\t<gpu_power_readings>\n"
        f"\t\t\t<current_power_limit>{gpu['power_limit_milliwatts'] / 1000:.2f} W"
        "</current_power_limit>\n"
        f"\t\t\t<default_power_limit>{gpu['default_power_limit_milliwatts'] / 1000:.2f} W"
        "</default_power_limit>\n"
        "\t\t</gpu_power_readings>\n"
        f"\t\t<max_clocks><sm_clock>{gpu['max_sm_clock_megahertz']} MHz</sm_clock>"
        f"<mem_clock>{gpu['max_memory_clock_megahertz']} MHz</mem_clock></max_clocks>\n"
        "\t\t<fabric><state>Completed</state><status>Success</status></fabric>\n"
        "\t</gpu>\n"
    )


def _matrix(tree: Tree, adapters: list[tuple[str, str, int]], *, links: list[str] | None) -> str:
    """`topo -m`, or `topo -mp` without `links`."""
    numas = [gpu["numa_node"] for gpu in tree.gpus]
    devices = [
        *((f"GPU{index}", chain, numas[index]) for index, chain in enumerate(tree.chains)),
        *((f"NIC{place}", chain, numa) for place, (_, chain, numa) in enumerate(adapters)),
    ]
    tails = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["\t" + "\t".join([*(name for name, _, _ in devices), *tails])]
    for row, (name, chain, numa) in enumerate(devices):
        cells = []
        for column, (other, other_chain, other_numa) in enumerate(devices):
            both = name.startswith("GPU") and other.startswith("GPU")
            if row == column:
                cells.append(" X ")
            elif both and links is not None:
                cells.append(links[row])
            else:
                cells.append(_WAYS[ancestor(chain, other_chain, same_numa=numa == other_numa)])
        cores = "0-55,112-167" if numa == 0 else "56-111,168-223"
        tail = [cores, str(numa), "", "N/A"] if name.startswith("GPU") else []
        lines.append("\t".join([name, *cells, *tail]))
    legend = [f"  NIC{place}: {name}" for place, (name, _, _) in enumerate(adapters)]
    return "\n".join(
        [*lines, "", "Legend:", "", "  X    = Self", "", "NIC Legend:", "", *legend, ""]
    )


def _p2p_matrix(count: int) -> str:
    lines = [" \t" + "\t".join(f"GPU{index}" for index in range(count)) + "\t"]
    for row in range(count):
        cells = ["X" if row == column else "OK" for column in range(count)]
        lines.append(f" GPU{row}\t" + "\t".join(cells) + "\t")
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  OK   = Status Ok", ""])
