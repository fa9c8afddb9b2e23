"""Dropout: elements set to 0 at random, and the others scaled up, while a model is trained.

Numbers come from torch's generator of the device, which each rank seeds by its own number and saves
in its checkpoints. All that is dropped here is of one rank alone (its heads, its tokens), so masks
differ between all ranks, and none has to agree with another's. Where a forward pass is computed
again, it draws what it drew: `parallel/recompute.py` sees to it.

Shape suffixes: B batch, T sequence, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import DropoutConfig

NOTHING = DropoutConfig()


class Dropout(nn.Module):
    """`nn.Dropout`, of which backward keeps a byte an element on every device."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not self.training:
            return x_BTD
        dropped: Tensor = torch.native_dropout(x_BTD, self.probability, True)[0]
        return dropped


def dropout_of(probability: float) -> Dropout | None:
    """What drops so much; None: nothing."""
    return Dropout(probability) if probability else None
