"""Matmuls: cubes of growing size, and the shapes of a plan or of a grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdpplan.spec.measurement import MeasuredMatmul, Measurement
from fsdpplan.topology.measure.clock import Call
from fsdpplan.topology.measure.runner import Cell, Seconds
from fsdpplan.topology.measure.settings import MeasuredDtype, Settings, Shape

if TYPE_CHECKING:
    import torch

COARSE_CUBES = (256, 1024, 4096)
CUBES = (512, 2048, 8192)
GRID: tuple[Shape, ...] = (
    (8192, 1024, 4096),
    (4096, 3072, 3072),
    (8192, 4096, 4096),
    (5120, 5120, 5120),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (14336, 4096, 4096),
    (8192, 8192, 2048),
    (2048, 8192, 8192),
    (16384, 6144, 6144),
    (16384, 8192, 8192),
)
"""Shapes of blocks from 1B to 70B, beside the cubes."""

UNALIGNED: tuple[Shape, ...] = (
    (8192, 50257, 1280),
    (8192, 1280, 50257),
)
"""Of a head with GPT-2's vocabulary, whose rows begin at no multiple of 16 bytes: its output, and
the gradient of its input."""

_BYTES: dict[MeasuredDtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
_RESULT_BYTES: dict[MeasuredDtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}


def matmul_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    """Cubes in all number formats, the other shapes in the first one, and in all where they are a
    plan's; last, on a GPU, the largest cube for seconds on end."""
    first = settings.matmul_dtypes[0]
    for dtype in settings.matmul_dtypes:
        for edge in COARSE_CUBES:
            yield _cell((edge, edge, edge), dtype, device, is_coarse=True)
        others = [(edge, edge, edge) for edge in CUBES]
        if dtype == first and not settings.shapes:
            others += GRID + (UNALIGNED if device.type == "cuda" else ())
        others += settings.shapes
        for shape in sorted(dict.fromkeys(others), key=_flops):
            yield _cell(shape, dtype, device)
    if device.type == "cuda":
        largest = CUBES[-1]
        yield _cell((largest, largest, largest), first, device, lasts=True)


def _flops(shape: Shape) -> int:
    m, n, k = shape
    return 2 * m * n * k


def _cell(
    shape: Shape,
    dtype: MeasuredDtype,
    device: torch.device,
    *,
    is_coarse: bool = False,
    lasts: bool = False,
) -> Cell:
    m, n, k = shape

    def rows(seconds: Seconds) -> Iterator[Measurement]:
        for rank, own in enumerate(seconds):
            yield MeasuredMatmul(rank=rank, m=m, n=n, k=k, dtype=dtype, seconds=tuple(own))

    return Cell(
        name=f"matmul {dtype} {m} x {n} x {k}" + (", for long" if lasts else ""),
        series=f"matmul {dtype}",
        work=_flops(shape),
        # operands are made in fp32 first
        needed_bytes=max(4, _BYTES[dtype] + 4) * (m * k + n * k) + _RESULT_BYTES[dtype] * m * n,
        prepare=lambda: _prepared(shape, dtype, device),
        rows=rows,
        is_coarse=is_coarse,
        lasts=lasts,
    )


def _prepared(shape: Shape, dtype: MeasuredDtype, device: torch.device) -> Call:
    """The product as a linear layer has it: the weight lies (n x k).

    Operands are random: a GPU draws less power for zeros, and so runs faster.
    """
    import torch

    m, n, k = shape
    left, right = (torch.randn(rows, k, device=device) for rows in (m, n))
    if dtype == "fp8":
        call = _scaled(left, right, device)
    else:
        formats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        left, right = (one.to(formats[dtype]) for one in (left, right))
        call = lambda: torch.mm(left, right.t())  # noqa: E731
    call()
    return call


def _scaled(left: torch.Tensor, right: torch.Tensor, device: torch.device) -> Call:
    """The product in fp8 with one scale a tensor. Raises RuntimeError where there is none."""
    import torch
    from torch.nn import functional

    if not hasattr(functional, "scaled_mm"):
        raise RuntimeError("torch has fp8 matmuls from 2.10 on")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise RuntimeError("this GPU has no fp8 matmuls")
    whole = functional.ScalingType.TensorWise
    scale = torch.ones((), device=device)
    narrow_left, narrow_right = (one.to(torch.float8_e4m3fn) for one in (left, right))
    return lambda: functional.scaled_mm(
        narrow_left,
        narrow_right.t(),
        scale,
        whole,
        scale,
        whole,
        output_dtype=torch.bfloat16,
    )
