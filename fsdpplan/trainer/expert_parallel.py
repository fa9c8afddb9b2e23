"""Expert parallelism: each rank holds some of the routed experts, tokens travel to them."""

from __future__ import annotations

from torch import nn

from .config import PlanConfig
from .mesh import Meshes


def apply_expert_parallel(part: nn.Module, plan: PlanConfig, meshes: Meshes) -> None:
    """Split the routed experts of `part` over `meshes.experts`, and over tp."""
    raise NotImplementedError
