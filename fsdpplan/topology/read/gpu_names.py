"""What the name of a GPU, or its PCI number, says where NVML was not asked: `nvidia-smi -L`, NCCL's
topology."""

from __future__ import annotations

import re
from collections.abc import Mapping

UNNAMED_GPU = "GPU of unknown name"

_LISTED = re.compile(
    r"^\s*GPU ([0-9]{1,3}): (\S[ -~]{0,80}?) \(UUID: (GPU-[0-9A-Za-z-]{1,64})\)", re.MULTILINE
)

_CAPABILITIES = (
    (r"P100", (6, 0)),
    (r"V100", (7, 0)),
    (r"A100|A800|A30\b", (8, 0)),
    (r"RTX A6000|RTX A5500|RTX A5000|RTX A4500|A40\b|A10\b|RTX 3090", (8, 6)),
    (r"H100|H200|H800|H20\b|GH200", (9, 0)),
    (r"B200|GB200", (10, 0)),
    (r"B300|GB300", (10, 3)),
)
"""Products with NVLinks and their compute capability. Source: developer.nvidia.com/cuda-gpus."""

_NVLINKS = {(6, 0): 4, (7, 0): 6, (8, 0): 12, (8, 6): 4}
"""Links of a GPU by its capability (NVIDIA's pages on NVLink: 4, 6, 12; a bridge of GA10x joins two
by 4); 18 since Hopper."""
MOST_NVLINKS = 18
UNKNOWN_NVLINK = 7
"""A version of NVML's that says nothing by itself: see `_generation` in `conclude/gpus.py`."""

_PCI_NAMES = {
    "0x1db1": "Tesla V100-SXM2-16GB",
    "0x1db5": "Tesla V100-SXM2-32GB",
    "0x20b0": "NVIDIA A100-SXM4-40GB",
    "0x20b2": "NVIDIA A100-SXM4-80GB",
    "0x20b5": "NVIDIA A100 80GB PCIe",
    "0x20f1": "NVIDIA A100-PCIE-40GB",
    "0x2324": "NVIDIA H800",
    "0x2330": "NVIDIA H100 80GB HBM3",
    "0x2331": "NVIDIA H100 PCIe",
    "0x2335": "NVIDIA H200",
    "0x2901": "NVIDIA B200",
}
"""PCI numbers of NVIDIA's devices that have one product each, and its name in the driver. Source:
the PCI ID Repository, pci.ids, vendor 10de."""


def listed_gpus(text: str) -> dict[int, str]:
    """GPU -> name, of the lines that `nvidia-smi -L` prints."""
    return {int(match[1]): match[2] for match in _LISTED.finditer(text)}


def gpu_facts(index: int, name: str | None) -> dict[str, object]:
    """Number, name and compute capability, as a recording of NVML has them."""
    capability = capability_of(name)
    known: Mapping[str, object] = (
        {} if capability is None else {"compute_capability": list(capability)}
    )
    return {"index": index, "name": name or UNNAMED_GPU, **known}


def capability_of(name: str | None) -> tuple[int, int] | None:
    """Compute capability of a product; None for one that is not in the table."""
    return next(
        (capability for pattern, capability in _CAPABILITIES if re.search(pattern, name or "")),
        None,
    )


def nvlinks_of_capability(capability: tuple[int, int] | None) -> int:
    """The most NVLinks that a GPU of this capability has."""
    return MOST_NVLINKS if capability is None else _NVLINKS.get(capability, MOST_NVLINKS)


def name_of_pci(vendor: str | None, device: str | None) -> str | None:
    """The product with this PCI number."""
    return _PCI_NAMES.get((device or "").lower()) if (vendor or "").lower() == "0x10de" else None
