"""Memory: an element-wise kernel, copies between host and device, and the start of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from fsdpplan.spec.measurement import MeasuredCopy, MeasuredLaunch, MeasuredMemory, Measurement
from fsdpplan.topology.measure.clock import Call
from fsdpplan.topology.measure.runner import Cell, Seconds
from fsdpplan.units import MIB

if TYPE_CHECKING:
    import torch

COARSE_TRAFFIC_BYTES = (16 * MIB, 256 * MIB)
TRAFFIC_BYTES = (64 * MIB, 1024 * MIB, 4096 * MIB)
COARSE_COPIED_BYTES = (MIB, 64 * MIB)
COPIED_BYTES = (16 * MIB, 256 * MIB)
COARSE_KERNELS, KERNELS = 100, 1000
TINY_ELEMENTS = 64

Direction = Literal["host_to_device", "device_to_host"]
DIRECTIONS: tuple[Direction, ...] = ("host_to_device", "device_to_host")


def memory_cells(device: torch.device) -> Iterator[Cell]:
    """Element-wise kernels, small to large."""
    for traffic_bytes in COARSE_TRAFFIC_BYTES:
        yield _memory_cell(traffic_bytes, device, is_coarse=True)
    for traffic_bytes in TRAFFIC_BYTES:
        yield _memory_cell(traffic_bytes, device)


def launch_cells(device: torch.device) -> Iterator[Cell]:
    """Tiny kernels in a row: what the host needs for each, since the device needs less."""
    yield _launch_cell(COARSE_KERNELS, device, is_coarse=True)
    yield _launch_cell(KERNELS, device)


def copy_cells(device: torch.device) -> Iterator[Cell]:
    """Copies both ways, from pinned memory and not; none for a CPU, which is its own host."""
    if device.type == "cpu":
        return
    for direction in DIRECTIONS:
        for pinned in (True, False):
            for copied_bytes in COARSE_COPIED_BYTES:
                yield _copy_cell(direction, pinned, copied_bytes, device, is_coarse=pinned)
            for copied_bytes in COPIED_BYTES:
                yield _copy_cell(direction, pinned, copied_bytes, device)


def _memory_cell(traffic_bytes: int, device: torch.device, *, is_coarse: bool = False) -> Cell:
    def prepare() -> Call:
        import torch

        source = torch.zeros(traffic_bytes // 8, device=device)
        target = torch.empty_like(source)
        torch.add(source, 1.0, out=target)
        return lambda: torch.add(source, 1.0, out=target)

    def rows(seconds: Seconds) -> Iterator[Measurement]:
        for rank, own in enumerate(seconds):
            yield MeasuredMemory(rank=rank, traffic_bytes=traffic_bytes, seconds=tuple(own))

    return Cell(
        name=f"memory traffic of {traffic_bytes // MIB} MiB",
        series="memory",
        work=traffic_bytes,
        needed_bytes=traffic_bytes,
        prepare=prepare,
        rows=rows,
        is_coarse=is_coarse,
    )


def _launch_cell(kernels: int, device: torch.device, *, is_coarse: bool = False) -> Cell:
    def prepare() -> Call:
        import torch

        tiny = torch.zeros(TINY_ELEMENTS, device=device)

        def call() -> None:
            for _ in range(kernels):
                tiny.add_(1.0)

        call()
        return call

    def rows(seconds: Seconds) -> Iterator[Measurement]:
        for rank, own in enumerate(seconds):
            yield MeasuredLaunch(rank=rank, kernels=kernels, seconds=tuple(own))

    return Cell(
        name=f"start of {kernels} kernels",
        series="launch",
        work=kernels,
        needed_bytes=4 * TINY_ELEMENTS,
        prepare=prepare,
        rows=rows,
        is_coarse=is_coarse,
        by_host=True,
    )


def _copy_cell(
    direction: Direction,
    pinned: bool,
    copied_bytes: int,
    device: torch.device,
    *,
    is_coarse: bool = False,
) -> Cell:
    def prepare() -> Call:
        import torch

        here = torch.zeros(copied_bytes, dtype=torch.uint8, pin_memory=pinned)
        there = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
        source, target = (here, there) if direction == "host_to_device" else (there, here)
        return lambda: target.copy_(source, non_blocking=pinned)

    def rows(seconds: Seconds) -> Iterator[Measurement]:
        for rank, own in enumerate(seconds):
            yield MeasuredCopy(
                rank=rank,
                direction=direction,
                pinned=pinned,
                copied_bytes=copied_bytes,
                seconds=tuple(own),
            )

    kind = "pinned" if pinned else "pageable"
    return Cell(
        name=f"{direction.replace('_', ' ')} of {copied_bytes // MIB} MiB, {kind}",
        series=f"{direction} {kind}",
        work=copied_bytes,
        needed_bytes=copied_bytes,
        prepare=prepare,
        rows=rows,
        is_coarse=is_coarse,
    )
