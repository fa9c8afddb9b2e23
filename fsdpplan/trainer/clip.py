"""Clipping: the norm of all gradients over all ranks, whatever mesh each parameter is on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .mesh import Meshes


def clip_gradients(model: nn.Module, meshes: Meshes | None, clip_norm: float) -> Tensor:
    """Scale the gradients down to `clip_norm` in all; returns their norm before.

    The norm is over all ranks: of sharded gradients by DTensor, of DDP's they are equal already.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
