"""NF4: frozen matrices in 4 bits, as plain tensors that FSDP gathers as they are.

Each weight is the nearest of 16 levels times the scale of its block of 64, along the flattened
matrix. Scales have 8 bits: codes of the 256 values of a dynamic map, times an fp32 scale of each
256 of them, plus an fp32 mean of all. So a matrix is three tensors of bytes: two codes a byte, one
byte a block, and fp32 numbers as four bytes each, which no policy of mixed precision casts.

Sources: QLoRA (arXiv 2305.14314), section 3; levels, map and packing are those of bitsandbytes
(`create_dynamic_map`, `quantize_4bit` with double quantisation).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..private_torch import ambient_fake_mode

BLOCK = 64
"""Weights of a scale."""
GROUP = 256
"""Scales of a scale of their own."""
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution, in order."""
LEAST_SCALE = 1e-38
"""Of a block of zeros, which is divided by it."""
PIECE_BLOCKS = 2**16
"""Blocks that are in fp32 at a time: 16 MiB."""

PARTS = ("codes", "block_scales", "scales")
"""Names of the tensors of a matrix."""


class Quantised(NamedTuple):
    """A matrix in NF4."""

    codes: Tensor
    """Two of each byte, the first one in the upper half."""
    block_scales: Tensor
    """A code of the dynamic map for each block."""
    scales: Tensor
    """(groups + 1, 4 bytes): the scale of each group, and the mean of the blocks' scales."""


def sizes(elements: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the `PARTS` of a matrix of so many weights."""
    blocks = -(-elements // BLOCK)
    groups = -(-blocks // GROUP)
    shapes: tuple[tuple[int, ...], ...] = ((-(-elements // 2),), (blocks,), (groups + 1, 4))
    return dict(zip(PARTS, shapes, strict=True))


def dynamic_map() -> Tensor:
    """256 values from -1 to 1: fractions of the powers of ten, the smaller ones in fewer steps."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        means = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


_MAP = tuple(dynamic_map().tolist())
"""Its values, read once: under fake tensors there are none to read."""


def _table(name: str, device: torch.device) -> Tensor:
    # a fake tensor is its mode's alone
    make = _kept_table if ambient_fake_mode() is None else _kept_table.__wrapped__
    return make(name, device)


@lru_cache(maxsize=16)
def _kept_table(name: str, device: torch.device) -> Tensor:
    levels = torch.tensor(LEVELS, device="cpu")
    if name == "pairs":  # what a byte says: two levels
        both = [levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))]
        table = torch.stack(both, 1)
    elif name == "map":
        table = torch.tensor(_MAP, device="cpu")
    else:
        values = levels if name == "levels between" else torch.tensor(_MAP, device="cpu")
        table = (values[:-1] + values[1:]) / 2
    return table.to(device)


@torch.no_grad()
def quantise(weight: Tensor, codes: slice | None = None) -> Quantised:
    """`weight` in NF4; of its codes the bytes of the slice, or all. A part of it is in fp32 at a
    time."""
    flat = weight.reshape(-1)
    blocks = -(-len(flat) // BLOCK)
    largest = torch.empty(blocks, dtype=torch.float32, device=flat.device)
    for first in range(0, blocks, PIECE_BLOCKS):
        piece = _in_blocks(flat, first, min(first + PIECE_BLOCKS, blocks))
        torch.amax(piece.abs(), 1, out=largest[first : first + len(piece)])
    number = -(-len(flat) // 2)
    begin, end, _ = (codes or slice(0, number)).indices(number)
    packed = torch.empty(end - begin, dtype=torch.uint8, device=flat.device)
    bytes_of_piece = PIECE_BLOCKS * BLOCK // 2
    for first in range(begin // (BLOCK // 2) * (BLOCK // 2), end, bytes_of_piece):
        last = min(first + bytes_of_piece, end)
        block, behind = first // (BLOCK // 2), -(-last // (BLOCK // 2))
        piece = _codes(_in_blocks(flat, block, behind), largest[block:behind])
        from_, to = max(first, begin), last
        packed[from_ - begin : to - begin] = piece[from_ - first : to - first]
    return Quantised(packed, *_quantise_scales(largest))


def _in_blocks(flat: Tensor, first: int, behind: int) -> Tensor:
    """Blocks in fp32, the last one of a matrix filled with zeros."""
    part = flat[first * BLOCK : behind * BLOCK].float()
    return F.pad(part, (0, (behind - first) * BLOCK - len(part))).view(-1, BLOCK)


def _codes(blocks: Tensor, largest: Tensor) -> Tensor:
    fractions = blocks * (1.0 / largest.clamp(min=LEAST_SCALE))[:, None]
    levels = torch.bucketize(fractions.flatten(), _table("levels between", blocks.device))
    high, low = levels.to(torch.uint8).view(-1, 2).unbind(1)
    return (high << 4) | low


def _quantise_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """(codes of the blocks' scales, bytes of their scales and of the mean)."""
    mean = largest.double().mean().float()
    rest = largest - mean
    groups = -(-len(rest) // GROUP)
    padded = F.pad(rest, (0, groups * GROUP - len(rest))).view(groups, GROUP)
    scales = padded.abs().amax(1)
    fractions = padded * (1.0 / scales.clamp(min=LEAST_SCALE))[:, None]
    codes = torch.bucketize(fractions.flatten(), _table("map between", rest.device))
    numbers = torch.cat([scales, mean[None]])
    return codes[: len(rest)].to(torch.uint8), numbers[:, None].view(torch.uint8)


def dequantise(stored: Quantised, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The matrix that NF4 stands for."""
    codes, block_scales, scales = stored
    elements, blocks = prod(shape), len(block_scales)
    numbers = scales.view(torch.float32).flatten()
    pairs, of_map = _table("pairs", codes.device), _table("map", codes.device)
    whole = torch.empty(elements, dtype=dtype, device=codes.device)
    for first in range(0, blocks, PIECE_BLOCKS):  # a piece begins with a group
        behind = min(first + PIECE_BLOCKS, blocks)
        of_blocks = F.embedding(block_scales[first:behind].int(), of_map[:, None]).flatten()
        of_groups = numbers[first // GROUP : -(-behind // GROUP)].repeat_interleave(GROUP)
        of_blocks = of_blocks * of_groups[: behind - first] + numbers[-1]
        bytes_ = codes[first * BLOCK // 2 : behind * BLOCK // 2]
        values = F.embedding(bytes_.int(), pairs).flatten()
        full = len(values) // BLOCK
        at = first * BLOCK
        whole[at : at + full * BLOCK] = (
            values[: full * BLOCK].view(full, BLOCK) * of_blocks[:full, None]
        ).flatten()
        if full < behind - first:
            rest = values[full * BLOCK :][: elements - at - full * BLOCK]
            whole[at + full * BLOCK :] = rest * of_blocks[full]
    return whole.view(shape)


def linear(x: Tensor, stored: Quantised, shape: torch.Size, bias: Tensor | None) -> Tensor:
    """`x` times the transposed matrix, plus `bias`. Backward dequantises again, so that what is
    kept for it are the bytes."""
    out: Tensor = _Linear.apply(x, *stored, shape)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias.to(out.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, blocks: Tensor, scales: Tensor, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(codes, blocks, scales)
        ctx.shape = shape
        return F.linear(x, dequantise(Quantised(codes, blocks, scales), shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        weight = dequantise(Quantised(*ctx.saved_tensors), ctx.shape, gradient.dtype)
        return gradient @ weight, None, None, None, None
