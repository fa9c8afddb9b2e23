from __future__ import annotations

import pytest

from fsdpplan.topology.read.lanes import (
    gpu_link_bytes_per_second,
    healthy_gpu_link_bytes_per_second,
    pcie_bytes_per_second,
    socket_bytes_per_second,
)
from tests.topology.found import machine


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    [(3, 16, 15.75), (4, 16, 31.5), (5, 16, 63.0), (4, 8, 15.75)],
)
def test_a_pcie_link_carries_what_its_lanes_do(
    generation: int, width: int, gigabytes: float
) -> None:
    rate = pcie_bytes_per_second(generation, width)
    assert rate == pytest.approx(gigabytes * 1e9, rel=1e-3)


@pytest.mark.parametrize(("generation", "width"), [(None, 16), (4, None), (4, 0), (9, 16)])
def test_an_unknown_link_has_no_bandwidth(generation: int | None, width: int | None) -> None:
    assert pcie_bytes_per_second(generation, width) is None


def test_an_idle_gpu_is_not_held_to_the_generation_that_saves_power() -> None:
    idle, half = machine("pcie-half-width").gpus[0], machine("pcie-half-width").gpus[2]
    assert idle.pcie_generation == 1
    assert gpu_link_bytes_per_second(idle) == pytest.approx(31.5e9, rel=1e-3)
    assert gpu_link_bytes_per_second(half) == pytest.approx(15.75e9, rel=1e-3)
    assert healthy_gpu_link_bytes_per_second(half) == gpu_link_bytes_per_second(idle)


@pytest.mark.parametrize(
    ("cpu", "gigabytes"),
    [
        ("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz", 6),
        ("Intel(R) Xeon(R) Platinum 8168 CPU @ 2.70GHz", 10),
        ("Intel(R) Xeon(R) Platinum 8480CL", 22),
        ("INTEL(R) XEON(R) PLATINUM 8570", 40),
        ("AMD EPYC 7742 64-Core Processor", 16),
        ("AMD EPYC 7R13 Processor", 24),
        ("AMD EPYC 9654 96-Core Processor", 24),
        ("AMD EPYC 9575F 64-Core Processor", 32),
        ("Neoverse-V2", None),
        (None, None),
    ],
)
def test_the_link_between_sockets_is_known_for_the_cpus_that_nccl_knows(
    cpu: str | None, gigabytes: float | None
) -> None:
    expected = None if gigabytes is None else gigabytes * 1e9
    assert socket_bytes_per_second(cpu) == expected
