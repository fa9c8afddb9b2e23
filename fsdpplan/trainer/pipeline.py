"""Pipeline parallelism: blocks in stages, micro-batches through them by torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .batch import MicroBatch
from .config import PlanConfig
from .mesh import Meshes
from .model import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """What one stage is made of."""

    index: int
    """Of all stages, from 0."""
    blocks: range
    """Numbers of its blocks in the whole model."""


def rank_shares(plan: PlanConfig, *, pp_rank: int) -> tuple[StageShare, ...]:
    """The stages of pipeline rank `pp_rank`, in order of their index."""
    raise NotImplementedError


def cut_stages(decoder: Decoder, plan: PlanConfig, *, pp_rank: int) -> tuple[nn.Module, ...]:
    """The stages of this rank as modules that share the decoder's blocks, in order."""
    raise NotImplementedError


class Pipeline:
    """The stages of this rank under the plan's schedule."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        plan: PlanConfig,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        raise NotImplementedError

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Gradients of the mean loss; returns that loss on ranks with the last stage, else 0."""
        raise NotImplementedError
