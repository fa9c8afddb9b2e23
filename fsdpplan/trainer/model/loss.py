"""The loss: cross-entropy of the next token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import PlanConfig
from ..text.batch import IGNORED
from .chunked_loss import chunked_loss_function


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 over all targets; an ignored one counts as 0.

    So every micro-batch weighs the same; `packing.counted_fraction` is what makes it a mean over
    the targets that count.
    """
    logits, targets = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    # split over the vocabulary, logits make a loss that is the same on all ranks
    total = total.to_local() if isinstance(total, DTensor) else total
    return total / targets.numel()


def loss_function(
    plan: PlanConfig, device: torch.device, part: nn.Module | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of what `part` returns: the model, its wrapper, or the last stage (None: this rank
    has it not).

    Compiled where the blocks are: eager, it reads and writes the logits in fp32 several times over.
    """
    layout = plan.layout
    compiles = layout.compile and device.type == "cuda"
    if layout.loss_chunks > 1 and part is not None:
        return chunked_loss_function(
            part, chunks=layout.loss_chunks, compiles=compiles, vocab=plan.model.vocab
        )
    return _compiled_loss() if compiles else next_token_loss


@cache
def _compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """One for all steps, so that it is compiled once."""
    return torch.compile(next_token_loss)
