"""The frozen base of adapters, told from others by a number: checkpoints hold it in its place."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model.weights import named_parameters
from ..parallel.shards import Box, local, own_box

ROW, COLUMN = 0x1B873593_CC9E2D51, 0x2545F491_4F6CDD1D
"""Multipliers that let the same bits count otherwise elsewhere."""
PIECE = 2**22
"""Elements that are counted at a time."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> as what its bits are read."""


@torch.no_grad()
def base_fingerprint(
    model: nn.Module,
    copies: Collection[str] = (),
    *,
    group: dist.ProcessGroup | None = None,
) -> str:
    """A digest of the bits of all that is frozen, alike in every layout; all ranks call this.
    `copies` names parameters that stand elsewhere, too.

    Of each parameter the sum of its elements' bits, each times an odd number of its own, modulo
    2**64: one element that differs changes it.
    """
    mine: dict[tuple[Any, ...], int] = {}
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad and name not in copies:
            box = own_box(parameter)
            mine[name, *(each.start for each in box)] = _sum(local(parameter), box)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    sums: dict[str, int] = {}
    for (name, *_), part in {key: part for each in gathered for key, part in each.items()}.items():
        sums[name] = (sums.get(name, 0) + part) % 2**64
    return fingerprint_of(sums)


def fingerprint_of(sums: Mapping[str, int]) -> str:
    """The digest of the sums of all parameters."""
    text = "\n".join(f"{name} {total:016x}" for name, total in sorted(sums.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def sum_of(whole: Tensor) -> int:
    """Of a parameter that is whole."""
    return _sum(whole, own_box(whole))


def _sum(part: Tensor, box: Box) -> int:
    if not part.numel():
        return 0
    rows = part.contiguous().view(BITS[part.element_size()]).view(len(part), -1)
    first = [each.start for each in box] + [0]
    by_column = _odd(first[1], rows.shape[1], COLUMN, part.device)
    total = 0
    each = max(1, PIECE // rows.shape[1])
    for begin in range(0, len(rows), each):
        piece = rows[begin : begin + each].long()
        by_row = _odd(first[0] + begin, len(piece), ROW, part.device)
        total += int(((piece * by_column).sum(1) * by_row).sum())
    return total % 2**64


def _odd(first: int, number: int, factor: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits, of `number` places from `first`."""
    places = torch.arange(first, first + number, dtype=torch.int64, device=device)
    return places * factor * 2 + 1
