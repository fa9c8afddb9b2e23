"""One table for embedding and head, of which a pipeline has two copies: on its ends.

Both copies begin equal and get the sum of both gradients, so they stay equal. In checkpoints, and
where numbers are drawn from a parameter's name, there is one, the embedding's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..config import PlanConfig
from .pipeline_stages import StageShare
from .replicas import local_gradient

TABLE = "tok_embeddings.weight"
HEAD = "output.weight"


def copied_parameters(plan: PlanConfig) -> dict[str, str]:
    """Name of each parameter that is a copy -> name of the one in whose place it stands."""
    return {HEAD: TABLE} if plan.model.tied_embeddings and plan.layout.pp > 1 else {}


class TiedTables:
    """The copies that this rank has."""

    def __init__(self, copies: Sequence[nn.Parameter], pp: DeviceMesh) -> None:
        self._copies = copies
        self._group = pp.get_group()

    @classmethod
    def of(
        cls,
        stages: Sequence[nn.Module],
        shares: Sequence[StageShare],
        plan: PlanConfig,
        pp: DeviceMesh,
    ) -> TiedTables | None:
        """None where the plan ties nothing, or this rank has neither end of the pipeline."""
        if not plan.model.tied_embeddings:
            return None
        ends = [(share.is_first, TABLE) for share in shares] + [
            (share.is_last, HEAD) for share in shares
        ]
        copies = [
            stage.get_parameter(name)
            for stage, (is_there, name) in zip([*stages, *stages], ends, strict=True)
            if is_there
        ]
        return cls(copies, pp) if copies else None

    def sum_gradients(self) -> None:
        """Give each copy the sum over both; the ranks of the two ends call this."""
        gradients = [local_gradient(copy) for copy in self._copies]
        if len(gradients) == 2:
            table, head = gradients
            table.add_(head)
            head.copy_(table)
            return
        (mine,) = gradients
        here, last = dist.get_rank(self._group), dist.get_world_size(self._group) - 1
        other = dist.get_global_rank(self._group, last if here == 0 else 0)
        theirs = torch.empty_like(mine)
        messages = [
            dist.P2POp(dist.isend, mine, other, self._group),
            dist.P2POp(dist.irecv, theirs, other, self._group),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        mine.add_(theirs)
