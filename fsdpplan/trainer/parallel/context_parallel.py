"""Context parallelism: ranks share a sequence, attention sees all of it.

Ranks trade heads for tokens (`ulysses`); or keys and values go around a ring of them, by torch's
context parallelism, each of which has an early and a late piece of the sequence: so causal
attention is as much work on each. The ring's kernels are CUDA's: elsewhere ranks trade heads
whatever the plan says, as those do that were written before plans said it.

All-to-all attention: ranks that share a sequence trade heads for tokens around attention.

Each rank has all heads of its tokens. Before attention it sends each other rank that one's heads
and gets its own heads of all tokens, so that attention itself, masks and all, is as on one rank;
after it, the other way round. Heads of zeros make up numbers that the ranks do not divide: so a
rehearsal can stand in for a ring, which divides no heads.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..config import PlanConfig
from ..errors import TrainerError
from ..model.attention import AttentionCore
from ..model.documents import Documents
from ..private_torch import attend_around_a_ring

Attend = Callable[..., Tensor]
"""Attention of (q, k, v), each (B, H, T, E), with `mask`, `documents` and `sinks_H` by name."""


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
        documents: Documents | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        heads = shared_heads(q_BHTE.shape[1], k_BHTE.shape[1], ranks=ranks)
        sent = heads.padded(q_BHTE), heads.repeated(k_BHTE), heads.repeated(v_BHTE)
        if sinks_H is not None:
            sinks_H = heads.padded(sinks_H[None, :, None, None]).flatten().chunk(ranks)[rank]
        own = heads_for_tokens(*sent, group=group, ranks=ranks)
        out = attend(*own, mask=mask, documents=documents, sinks_H=sinks_H)
        return heads.cut(tokens_for_heads(out, group=group, ranks=ranks))

    return traded


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedHeads:
    """How heads are made up so that the ranks of a group divide them, and what is shared."""

    key_heads: int
    """Before: of keys, and of values."""
    group: int
    """Before: query heads to a key head."""
    padded_key_heads: int
    """With those of zeros."""
    padded_group: int
    """With those of zeros."""
    copies: int
    """Of each key head, which have equal parts of its group."""

    @property
    def heads(self) -> int:
        """Query heads that are sent."""
        return self.padded_key_heads * self.padded_group

    def padded(self, q_BHTE: Tensor) -> Tensor:
        """All query heads that are sent."""
        if self.heads == q_BHTE.shape[1]:
            return q_BHTE
        grouped = q_BHTE.view(len(q_BHTE), self.key_heads, self.group, *q_BHTE.shape[2:])
        more = self.padded_group - self.group, self.padded_key_heads - self.key_heads
        return F.pad(grouped, (0, 0, 0, 0, 0, more[0], 0, more[1])).flatten(1, 2)

    def repeated(self, k_BHTE: Tensor) -> Tensor:
        """All key or value heads that are sent."""
        if self.padded_key_heads > self.key_heads:
            return F.pad(k_BHTE, (0, 0, 0, 0, 0, self.padded_key_heads - self.key_heads))
        return k_BHTE.repeat_interleave(self.copies, dim=1) if self.copies > 1 else k_BHTE

    def cut(self, out_BHTE: Tensor) -> Tensor:
        """The outputs of the query heads that there were."""
        if self.heads == self.key_heads * self.group:
            return out_BHTE
        groups = self.padded_key_heads, self.padded_group
        grouped = out_BHTE.view(len(out_BHTE), *groups, *out_BHTE.shape[2:])
        return grouped[:, : self.key_heads, : self.group].flatten(1, 2)


def shared_heads(heads: int, key_heads: int, *, ranks: int) -> SharedHeads:
    """Key heads are repeated until `ranks` divide them, and their groups of query heads are made up
    to be shared by the copies; or heads are added with their groups, if that sends fewer queries.
    """
    group = heads // key_heads
    copies = ranks // gcd(key_heads, ranks)
    padded_group, padded_key_heads = _multiple(group, copies), _multiple(key_heads, ranks)
    adds = padded_key_heads * group < key_heads * padded_group
    return SharedHeads(
        key_heads=key_heads,
        group=group,
        padded_key_heads=padded_key_heads if adds else key_heads,
        padded_group=group if adds else padded_group,
        copies=1 if adds else copies,
    )


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


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


def own_positions(plan: PlanConfig, *, cp_rank: int) -> Tensor:
    """Positions of the sequence, int64 (seq_len / cp), that rank `cp_rank` of the cp axis holds."""
    cp = plan.layout.cp
    positions = torch.arange(plan.training.seq_len)
    if plan.trades_heads:
        return positions.view(cp, -1)[cp_rank]
    pieces = positions.view(2 * cp, -1)
    return torch.cat([pieces[cp_rank], pieces[2 * cp - 1 - cp_rank]])


def apply_context_parallel(part: nn.Module, plan: PlanConfig, mesh: DeviceMesh) -> None:
    """Let the attention of `part` see the whole sequence, of which each rank holds a part.

    The core's `forward` is replaced, not the core: recomputation may wrap it again.
    """
    part.whole_length = plan.training.seq_len  # type: ignore[assignment]
    for core in [module for module in part.modules() if isinstance(module, AttentionCore)]:
        if plan.trades_heads:
            core.forward = trade_heads(core.forward, mesh.get_group())  # type: ignore[method-assign]
        else:
            core.register_forward_pre_hook(_refuse_documents, with_kwargs=True)
            attend_around_a_ring(core.kernel, mesh)


def _refuse_documents(_: nn.Module, __: tuple[Tensor, ...], given: dict[str, object]) -> None:
    if given.get("mask") is not None or given.get("documents") is not None:
        raise TrainerError(
            "ring attention knows no documents: leave --pack out, or plan again with "
            "--cp-attention ulysses or --cp 1"
        )
