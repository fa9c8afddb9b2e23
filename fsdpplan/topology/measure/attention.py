"""Attention: causal, forward and backward, as torch dispatches it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from fsdpplan.spec.measurement import MeasuredAttention, Measurement
from fsdpplan.topology.measure.clock import Call
from fsdpplan.topology.measure.runner import Cell, Seconds
from fsdpplan.topology.measure.settings import Attention, MeasuredDtype, Settings

if TYPE_CHECKING:
    import torch

COARSE = (
    Attention(batch=1, heads=8, kv_heads=8, seq_len=256, head_dim=128),
    Attention(batch=1, heads=16, kv_heads=16, seq_len=2048, head_dim=128),
)
GRID = (
    Attention(batch=1, heads=16, kv_heads=16, seq_len=1024, head_dim=128),
    Attention(batch=4, heads=32, kv_heads=8, seq_len=2048, head_dim=128),
    Attention(batch=2, heads=32, kv_heads=8, seq_len=4096, head_dim=128),
    Attention(batch=1, heads=32, kv_heads=8, seq_len=8192, head_dim=128),
)

LONG = (
    Attention(batch=1, heads=16, kv_heads=4, seq_len=16384, head_dim=128),
    Attention(batch=1, heads=8, kv_heads=2, seq_len=32768, head_dim=128),
    Attention(batch=1, heads=4, kv_heads=1, seq_len=65536, head_dim=128),
)
"""On a GPU, of which one is soon done with: what steps of long contexts do most of the time."""

AttentionDtype = Literal["bf16", "fp16", "fp32"]
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def attention_cells(settings: Settings, device: torch.device) -> Iterator[Cell]:
    """Two coarse shapes, then the plan's or a grid's, in the first format that is not fp8."""
    dtype = _dtype(settings.matmul_dtypes)
    grid = GRID + (LONG if device.type == "cuda" else ())
    for direction in DIRECTIONS:
        for shape in COARSE:
            yield _cell(shape, dtype, direction, device, is_coarse=True)
        for shape in sorted(settings.attention or grid, key=_work):
            yield _cell(shape, dtype, direction, device)


def _dtype(dtypes: tuple[MeasuredDtype, ...]) -> AttentionDtype:
    """Under fp8 attention computes in bf16."""
    for dtype in dtypes:
        if dtype != "fp8":
            return dtype
    return "bf16"


def _work(shape: Attention) -> float:
    return float(shape.batch * shape.heads * shape.seq_len**2 * shape.head_dim)


def _cell(
    shape: Attention,
    dtype: AttentionDtype,
    direction: Direction,
    device: torch.device,
    *,
    is_coarse: bool = False,
) -> Cell:
    def rows(seconds: Seconds) -> Iterator[Measurement]:
        for rank, own in enumerate(seconds):
            yield MeasuredAttention(
                rank=rank,
                batch=shape.batch,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                seq_len=shape.seq_len,
                head_dim=shape.head_dim,
                dtype=dtype,
                direction=direction,
                seconds=tuple(own),
            )

    return Cell(
        name=f"attention {direction} {shape.batch} x {shape.heads} heads x {shape.seq_len}",
        series=f"attention {direction}",
        work=_work(shape),
        # queries, keys, values, output and the gradients of each, with room for fp32 ones
        needed_bytes=16 * 4 * shape.batch * shape.heads * shape.seq_len * shape.head_dim,
        prepare=lambda: _prepared(shape, dtype, direction, device),
        rows=rows,
        is_coarse=is_coarse,
    )


def _prepared(
    shape: Attention, dtype: AttentionDtype, direction: Direction, device: torch.device
) -> Call:
    import torch
    from torch.nn import functional

    formats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    query, key, value = (
        torch.randn(
            (shape.batch, heads, shape.seq_len, shape.head_dim),
            device=device,
            dtype=formats[dtype],
            requires_grad=direction == "backward",
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
        )

    out = forward()
    if direction == "forward":
        return forward
    gradient = torch.randn_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    backward()
    return backward
