"""Tensor parallelism: each matrix split over ranks, the sequence split between the matmuls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from .config import LayoutConfig, PlanConfig


def apply_tensor_parallel(part: nn.Module, plan: PlanConfig, mesh: DeviceMesh) -> None:
    """Split the matrices of `part`, a decoder or a pipeline stage's share of one, over `mesh`."""
    raise NotImplementedError


def loss_context(layout: LayoutConfig) -> AbstractContextManager[None]:
    """In which the loss of logits that are split over the vocabulary, and its backward, run."""
    return loss_parallel() if layout.loss_parallel else nullcontext()
