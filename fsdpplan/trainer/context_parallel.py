"""Context parallelism: ranks share a sequence, attention sees all of it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .config import PlanConfig


def own_positions(plan: PlanConfig, *, cp_rank: int) -> Tensor:
    """Positions of the sequence, int64 (seq_len / cp), that rank `cp_rank` of the cp axis holds."""
    raise NotImplementedError


def apply_context_parallel(part: nn.Module, plan: PlanConfig, mesh: DeviceMesh) -> None:
    """Let the attention of `part` see the whole sequence, of which each rank holds a part."""
    raise NotImplementedError
