"""Balance: experts that got few tokens are chosen more easily in the next step.

A bias on each expert's score counts for the choice only, not for its weight. After each step it is
raised where an expert got fewer tokens than the mean, and lowered where it got more. Source:
DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallel.mesh import Meshes
from .moe import MixtureOfExperts

BALANCE_SPEED = 0.001
"""What a step adds to a bias, or takes (DeepSeek-V3, section 4.2), unless it is told otherwise."""


@torch.no_grad()
def balance_experts(
    model: nn.Module, meshes: Meshes | None, *, speed: float = BALANCE_SPEED
) -> Tensor | None:
    """Move each expert's bias by what all tokens of a step chose; returns how far the busiest
    expert of any block is above the mean (1: balanced), None without experts. With `speed` 0 the
    biases stay.

    `meshes` None is one process. Which number is greater is all that counts, so the biases depend
    neither on the layout nor on whether a recomputation was counted again.
    """
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        return None
    counts = torch.stack([mixture.counts for mixture in mixtures])
    for axis in ("dp_replicate", "dp_shard"):
        mesh = None if meshes is None else meshes.axis(axis)
        if mesh is not None and mesh.size() > 1:
            dist.all_reduce(counts, group=mesh.get_group())
    mean = counts.sum(-1, keepdim=True) / counts.shape[-1]
    moves = speed * torch.sign(mean - counts)
    for mixture, move in zip(mixtures, moves, strict=True):
        mixture.expert_bias.add_(move)
        mixture.counts.zero_()
    return (counts / mean).max()
