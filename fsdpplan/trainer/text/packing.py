"""Packing: sequences that hold several documents, each trained as if it stood alone.

Attention stays inside a document, positions begin anew in each, and what a document's last token
is followed by is no target. The loss is the mean over the targets that count, of all ranks and
micro-batches together: each rank takes the mean over all its targets, as ever, and the step is then
divided by the fraction of them that counts.

What one forward pass is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..clip import local_part
from ..private_torch import scale_all

IGNORED = -100
"""A target that no loss counts."""


class MicroBatch(NamedTuple):
    """Some sequences, or under context parallelism this rank's part of each."""

    tokens: Tensor
    """(B, T), int64."""
    targets: Tensor
    """(B, T), int64: the token that follows each, or IGNORED."""
    positions: Tensor | None = None
    """(B, T), int64: where in its document each token stands; None: 0, 1, 2 ..."""
    documents: Tensor | None = None
    """(B, whole T), int32: which document each token of the sequence belongs to; None: one."""


def pack(tokens_BS: Tensor, starts_BS: Tensor) -> MicroBatch:
    """Sequences of one token more than they train on, with the places where documents begin."""
    tokens_BT, targets_BT, begins_BT = tokens_BS[:, :-1], tokens_BS[:, 1:], starts_BS[:, :-1]
    places_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    first_of_document = torch.where(begins_BT, places_BT, 0).cummax(1).values
    return MicroBatch(
        tokens=tokens_BT.contiguous(),
        targets=torch.where(starts_BS[:, 1:], IGNORED, targets_BT),
        positions=places_BT - first_of_document,
        documents=begins_BT.cumsum(1).int(),
    )


def counted_fraction(micro_batches: Sequence[MicroBatch]) -> Tensor | None:
    """The fraction of a step's targets that counts, over all ranks; None where all do, since
    nothing is packed."""
    if micro_batches[0].documents is None:
        return None
    counts = torch.stack([(batch.targets != IGNORED).sum() for batch in micro_batches])
    targets = sum(batch.targets.numel() for batch in micro_batches)
    # ranks that share targets count them alike, so the fraction stays
    both = torch.stack([counts.sum(), torch.full_like(counts[0], targets)])
    dist.all_reduce(both)
    return both[0] / both[1]


def divide_gradients(model: nn.Module, fraction: Tensor) -> None:
    """Divide the gradients of all parameters in place."""
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    scale_all(gradients, fraction.reciprocal())
