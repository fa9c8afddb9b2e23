"""Norms in the dtype of the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..config import ModelConfig
from ..parallel.autograd_collectives import sum_over_ranks


def outside_autocast(x: Tensor) -> torch.autocast:
    """A context in which autocast leaves `x` as it is."""
    return torch.autocast(x.device.type, enabled=False)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input; the kernel sums in fp32 whatever that is.

    DDP's autocast would make it fp32 and each projection behind it a copy of its own. FSDP gathers
    the weight in the input's dtype already.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return super().forward(x)
        with outside_autocast(x):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the dtype of its input, for the same reason."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return super().forward(x)
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with outside_autocast(x):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads together, of which a tensor-parallel rank has some."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.mesh: DeviceMesh | None = None
        """The ranks that have the other heads; `weight` is then sharded over it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        with outside_autocast(x):
            if self.mesh is None:
                return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps)
            wide = x.float()  # once: backward keeps it
            squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), self.mesh)
            scale = torch.rsqrt(squares / (x.shape[-1] * self.mesh.size()) + self.eps)
            return (wide * scale).to(x.dtype) * weight.to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    """A norm of the residual stream."""
    if config.norm == "layernorm":
        return LayerNorm(config.hidden, eps=config.norm_epsilon, bias=config.norm_bias)
    return RMSNorm(config.hidden, eps=config.norm_epsilon)
