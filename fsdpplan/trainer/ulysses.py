"""All-to-all attention: ranks that share a sequence trade heads for tokens around attention.

Each rank has all heads of its tokens. Before attention it sends each other rank that one's heads
and gets its own heads of all tokens, so that attention itself, masks and all, is as on one rank;
after it, the other way round.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Attend = Callable[..., Tensor]
"""Attention of (q, k, v), each (B, H, T, E), with `mask` and `sinks_H` by name."""


class Exchange(torch.autograd.Function):
    """Send slice i of the first dimension to rank i of the group; get one from each."""

    @staticmethod
    def forward(ctx: Any, slices: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(slices, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, slices.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return exchange(gradient, ctx.group), None


def exchange(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`Exchange`, typed."""
    received: Tensor = Exchange.apply(slices, group)  # type: ignore[no-untyped-call]
    return received


def trade_heads(attend: Attend, group: dist.ProcessGroup) -> Attend:
    """`attend` for ranks of `group`, each of which has its part of the sequence, in order."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def traded(
        q_BHTE: Tensor,
        k_BHTE: Tensor,
        v_BHTE: Tensor,
        *,
        mask: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        copies = key_copies(k_BHTE.shape[1], ranks)
        if copies > 1:
            k_BHTE = k_BHTE.repeat_interleave(copies, dim=1)
            v_BHTE = v_BHTE.repeat_interleave(copies, dim=1)
        out = attend(
            *heads_for_tokens(q_BHTE, k_BHTE, v_BHTE, group=group, ranks=ranks),
            mask=mask,
            sinks_H=None if sinks_H is None else sinks_H.chunk(ranks)[rank],
        )
        return tokens_for_heads(out, group=group, ranks=ranks)

    return traded


def key_copies(key_heads: int, ranks: int) -> int:
    """How often each key and value head is repeated, so that `ranks` divides them."""
    return ranks // gcd(key_heads, ranks)


def heads_for_tokens(*tensors: Tensor, group: dist.ProcessGroup, ranks: int) -> list[Tensor]:
    """Of (B, H, own T, E) each: this rank's heads of the whole sequence, in one message a rank."""
    pieces = [
        tensor.view(len(tensor), ranks, -1, *tensor.shape[2:]).transpose(0, 1) for tensor in tensors
    ]
    received = exchange(torch.cat([piece.flatten(1) for piece in pieces], dim=1), group)
    whole = []
    parts = torch.split(received, [piece[0].numel() for piece in pieces], dim=1)
    for piece, part in zip(pieces, parts, strict=True):
        # (ranks, B, heads, own T, E) to (B, heads, T, E)
        whole.append(part.view(piece.shape).movedim(0, 2).flatten(2, 3))
    return whole


def tokens_for_heads(out_BHTE: Tensor, *, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """Of this rank's heads of the whole sequence: all heads of its own tokens."""
    batch, heads, _, width = out_BHTE.shape
    slices = out_BHTE.view(batch, heads, ranks, -1, width).movedim(2, 0)
    return exchange(slices, group).transpose(0, 1).flatten(1, 2)
