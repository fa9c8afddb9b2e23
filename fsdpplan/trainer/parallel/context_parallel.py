"""Context parallelism: ranks share a sequence, attention sees all of it.

On CUDA keys and values go around a ring of ranks, by torch's context parallelism, each of which has
an early and a late piece of the sequence: so causal attention is as much work on each. Its kernels
are CUDA's; elsewhere ranks trade heads for tokens (`ulysses`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..config import PlanConfig
from ..errors import TrainerError
from ..model.attention import AttentionCore
from ..private_torch import attend_around_a_ring
from .ulysses import trade_heads


def own_positions(plan: PlanConfig, *, cp_rank: int) -> Tensor:
    """Positions of the sequence, int64 (seq_len / cp), that rank `cp_rank` of the cp axis holds."""
    cp = plan.layout.cp
    positions = torch.arange(plan.training.seq_len)
    if plan.cluster.device.kind != "cuda":
        return positions.view(cp, -1)[cp_rank]
    pieces = positions.view(2 * cp, -1)
    return torch.cat([pieces[cp_rank], pieces[2 * cp - 1 - cp_rank]])


def apply_context_parallel(part: nn.Module, plan: PlanConfig, mesh: DeviceMesh) -> None:
    """Let the attention of `part` see the whole sequence, of which each rank holds a part.

    The core's `forward` is replaced, not the core: recomputation may wrap it again.
    """
    part.whole_length = plan.training.seq_len  # type: ignore[assignment]
    for core in [module for module in part.modules() if isinstance(module, AttentionCore)]:
        if mesh.device_type == "cuda":
            core.register_forward_pre_hook(_refuse_masks, with_kwargs=True)
            attend_around_a_ring(core.kernel, mesh)
        else:
            core.forward = trade_heads(core.forward, mesh.get_group())  # type: ignore[method-assign]


def _refuse_masks(_: nn.Module, __: tuple[Tensor, ...], given: dict[str, Tensor | None]) -> None:
    if given.get("mask") is not None:
        raise TrainerError(
            "ring attention knows no documents: leave --pack out, or plan again with --cp 1"
        )
