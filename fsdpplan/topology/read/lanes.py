"""Lanes: what a PCIe link and the link between two sockets carry, one direction."""

from __future__ import annotations

import re

from fsdpplan.spec.machine import Gpu, Nic

_LANE_BITS_PER_SECOND = {
    1: 2.5e9 * 8 / 10,
    2: 5e9 * 8 / 10,
    3: 8e9 * 128 / 130,
    4: 16e9 * 128 / 130,
    5: 32e9 * 128 / 130,
}
"""Data of one lane: transfers per second times the share that its code leaves for data, 8 of 10
bits to the second generation and 128 of 130 to the fifth. hwloc counts the same (31.508 GB/s for 16
lanes of the fourth, 63.015 of the fifth, in the test topology of aws-ofi-nccl)."""

_SOCKET_BYTES_PER_SECOND = (
    (r"EPYC 9[0-9]{2}5", 32e9),
    (r"EPYC (7[0-9A-Z]{2}3|9[0-9]{2}4)", 24e9),
    (r"EPYC 7[0-9A-Z]{2}[12]", 16e9),
    (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9][1-3][0-9]{2}", 10e9),
    (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]4[0-9]{2}", 22e9),
    (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]5[0-9]{2}", 40e9),
    (r"Xeon.* E[57]-", 6e9),
)
"""CPU models and what NCCL takes the link between two of them for: Zen 5 32 GB/s, Zen 3 and 4 24,
Zen 1 and 2 16; Skylake to Ice Lake 10, Sapphire Rapids 22, Emerald Rapids 40, Broadwell and before
6. Source: NCCL src/graph/topo.h at 069a3d4 (AMD_ZEN5_BW ... BDW_QPI_BW)."""


def pcie_bytes_per_second(generation: int | None, width: int | None) -> float | None:
    """Data of a PCIe link: gen3 x16 15.75 GB/s, gen4 31.5, gen5 63."""
    lane = _LANE_BITS_PER_SECOND.get(generation or 0)
    return None if lane is None or not width else lane * width / 8


def gpu_link_bytes_per_second(gpu: Gpu) -> float | None:
    """The GPU's link with the lanes that it has now.

    The generation is the most that GPU and slot can do together, since an idle GPU shows a lower
    one; without it, the one that it shows.
    """
    return pcie_bytes_per_second(gpu.pcie_max_generation or gpu.pcie_generation, gpu.pcie_width)


def healthy_gpu_link_bytes_per_second(gpu: Gpu) -> float | None:
    """The same with all lanes that GPU and slot can have."""
    return pcie_bytes_per_second(
        gpu.pcie_max_generation or gpu.pcie_generation, gpu.pcie_max_width or gpu.pcie_width
    )


def nic_link_bytes_per_second(nic: Nic) -> float | None:
    """The adapter's link, where it runs below what it could; None where it does not, or where that
    is unknown (virtual machines make such numbers up)."""
    now = pcie_bytes_per_second(nic.pcie_generation, nic.pcie_width)
    best = pcie_bytes_per_second(nic.pcie_max_generation, nic.pcie_max_width)
    return now if now is not None and best is not None and now < best else None


def socket_bytes_per_second(cpu: str | None) -> float | None:
    """The link between two sockets, as NCCL takes it; None for a CPU that is not in the table."""
    for pattern, rate in _SOCKET_BYTES_PER_SECOND:
        if re.search(pattern, cpu or "", re.IGNORECASE):  # the fifth Xeons write it in capitals
            return rate
    return None
