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
    """(B, N), int32: where the documents of each whole sequence end, the last ones over again up to
    a number N that few batches differ in; None: each sequence is one."""
    longest: Tensor | None = None
    """(B, L, 0), without a byte: no document has more than L tokens. A shape, since hosts know
    shapes of tensors on a device, and their values only when they wait for it."""
    masked: Tensor | None = None
    """(1,), int64: how many of the targets count; None: nothing but documents hides any. On all
    ranks of a step alike."""
    real: Tensor | None = None
    """(B, T), bool: which tokens do more than fill up their row; None: all, or nobody asks."""


BESIDE_TOKENS = ("positions", "documents", "longest", "real")
"""What a model is given of it beside its tokens."""


def model_inputs(batch: MicroBatch) -> dict[str, Tensor]:
    """What the decoder is given beside the tokens."""
    given = {name: getattr(batch, name) for name in BESIDE_TOKENS}
    return {name: value for name, value in given.items() if value is not None}


def pack(tokens_BS: Tensor, starts_BS: Tensor) -> MicroBatch:
    """Sequences of one token more than they train on, with the places where documents begin."""
    tokens_BT, targets_BT, begins_BT = tokens_BS[:, :-1], tokens_BS[:, 1:], starts_BS[:, :-1]
    places_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    first_of_document = torch.where(begins_BT, places_BT, 0).cummax(1).values
    positions_BT = places_BT - first_of_document
    return MicroBatch(
        tokens=tokens_BT.contiguous(),
        targets=torch.where(starts_BS[:, 1:], IGNORED, targets_BT),
        positions=positions_BT,
        documents=_ends(begins_BT),
        longest=_longest(int(positions_BT.max()) + 1, rows=len(tokens_BT), of=tokens_BT.shape[1]),
    )


def _ends(begins_BT: Tensor) -> Tensor:
    """(B, N): the first token of a sequence begins a document, whatever is said of it."""
    length = begins_BT.shape[1]
    rows = [(begins[1:].nonzero().flatten() + 1).tolist() for begins in begins_BT]
    number = rounded_up(max(map(len, rows)) + 1)
    return torch.tensor([row + [length] * (number - len(row)) for row in rows], dtype=torch.int32)


def _longest(tokens: int, *, rows: int, of: int) -> Tensor:
    return torch.empty(rows, min(of, rounded_up(tokens)), 0)


def rounded_up(number: int) -> int:
    """To a power of two: compiled blocks and kernels meet few numbers."""
    return 1 << (number - 1).bit_length()


def joined(micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """All micro-batches in one; without what they do not have."""
    columns = zip(MicroBatch._fields, zip(*micro_batches, strict=True), strict=True)
    return {name: _in_one(name, parts) for name, parts in columns if parts[0] is not None}


def _in_one(name: str, parts: Sequence[Tensor]) -> Tensor:
    if name == "documents":
        number = max(part.shape[1] for part in parts)
        last = [part[:, -1:].expand(-1, number - part.shape[1]) for part in parts]
        return torch.cat([torch.cat(both, dim=1) for both in zip(parts, last, strict=True)])
    if name == "longest":
        tokens = max(part.shape[1] for part in parts)
        return parts[0].new_empty(sum(map(len, parts)), tokens, 0)
    return torch.cat(list(parts))


def only_counted(batch: MicroBatch, counted_BS: Tensor) -> MicroBatch:
    """`batch` without the targets that do not count; `counted_BS` are of sequences of one token
    more than they train on."""
    targets = torch.where(counted_BS[:, 1:], batch.targets, IGNORED)
    return batch._replace(targets=targets, masked=(targets != IGNORED).sum()[None])


def counted_fraction(micro_batches: Sequence[MicroBatch]) -> Tensor | None:
    """The fraction of a step's targets that counts, over all ranks; None where all do, since
    nothing is packed or masked."""
    if micro_batches[0].documents is None and micro_batches[0].masked is None:
        return None
    # ranks that share targets count them alike, so the fraction stays
    counted, targets = count_targets([batch.targets for batch in micro_batches])
    return counted / targets


def count_targets(
    targets: Sequence[Tensor], *, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """(targets that count, all targets) in `targets` of all ranks; on `device`, by default where
    they are."""
    counted = torch.stack([(each != IGNORED).sum() for each in targets]).sum()
    number = torch.full_like(counted, sum(each.numel() for each in targets))
    both = torch.stack([counted, number]).to(counted.device if device is None else device)
    if dist.is_initialized():
        dist.all_reduce(both)
    return both[0], both[1]


def real_fraction(micro_batches: Sequence[MicroBatch]) -> Tensor | float:
    """The fraction of a step's tokens that are real, over all ranks."""
    found = [batch.real for batch in micro_batches if batch.real is not None]
    if not found:
        return 1.0
    real = torch.stack([each.sum() for each in found]).sum()
    both = torch.stack([real, torch.full_like(real, sum(each.numel() for each in found))])
    dist.all_reduce(both)
    return both[0] / both[1]


def divide_gradients(model: nn.Module, fraction: Tensor) -> None:
    """Divide the gradients of all parameters in place."""
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    scale_all(gradients, fraction.reciprocal())
