"""The loss: cross-entropy of the next token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import IGNORED
from .config import LayoutConfig


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in fp32, over the targets that count."""
    logits, targets = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED)


def loss_function(layout: LayoutConfig, device: torch.device) -> Callable[..., Tensor]:
    """Cross-entropy, compiled where the blocks are: eager, it reads and writes the logits in fp32
    several times over."""
    compiles = layout.compile and device.type == "cuda"
    return _compiled_loss() if compiles else next_token_loss


@cache
def _compiled_loss() -> Callable[..., Tensor]:
    """One for all steps, so that it is compiled once."""
    return torch.compile(next_token_loss)
