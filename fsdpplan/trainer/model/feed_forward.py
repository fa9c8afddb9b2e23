"""The dense feed-forward network of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU or GEGLU (w1 gate, w3 up, w2 down) or GELU (w1 up, w2 down)."""

    def __init__(self, hidden: int, inner: int, *, mlp: str, bias: bool) -> None:
        super().__init__()
        self.mlp = mlp
        self.w1 = nn.Linear(hidden, inner, bias=bias)
        self.w2 = nn.Linear(inner, hidden, bias=bias)
        if mlp != "gelu":
            self.w3 = nn.Linear(hidden, inner, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        inner = activate(self.w1(x_BTD), self.mlp)
        if self.mlp != "gelu":
            inner = inner * self.w3(x_BTD)
        projected: Tensor = self.w2(inner)
        return projected


def activate(x: Tensor, mlp: str) -> Tensor:
    """The activation: SiLU for SwiGLU, else the tanh form of GELU."""
    return F.silu(x) if mlp == "swiglu" else F.gelu(x, approximate="tanh")
