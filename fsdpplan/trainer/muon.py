"""Muon: the momentum of a matrix, orthogonalised, is its update.

    momentum = 0.95 momentum + 0.05 gradient
    update = NewtonSchulz(0.95 momentum + 0.05 gradient)       # Nesterov's; else of the momentum
    weight = (1 - rate * decay) weight - rate * 0.2 sqrt(max(rows, columns)) update

The scale gives an update the root mean square of AdamW's, so that one learning rate serves both.

Orthogonalising needs whole matrices. The ranks that share one deal them out: each gets all parts of
its own in one all-to-all, orthogonalises, and gives the parts back. A matrix is computed by one of
them, and each rank sends its parts twice, in 16 bits: far less than one gather of the parameters.
Replicas do the same work each. Matrices that are whole where they are (DDP's, and stacked experts
that are split between experts) need no message.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the scale:
"Muon is Scalable for LLM Training" (arXiv 2502.16982), section 2.2; constants also in torch 2.13
torch/optim/_muon.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .parallel.shards import Box, box_of, local, local_gradient, split_axes
from .shared import trainer_options

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
UPDATE_RMS = 0.2
EPSILON = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSettings:
    """What a step is told; the lists are by parameter."""

    learning_rates: Sequence[float]
    weight_decays: Sequence[float]
    momentum: float
    nesterov: bool
    """Look ahead: the update is the gradient's mean with the momentum that has it already."""
    steps: int
    """Of Newton-Schulz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Matrices that are exchanged together, by their numbers; the n-th is computed by the n-th rank
    of the group."""

    matrices: tuple[int, ...]
    group: dist.ProcessGroup
    boxes: tuple[Box, ...]
    """What each rank of the group holds of the one that this rank computes; none without one."""
    shape: tuple[int, ...]
    """Of that one: of a stack, what the group has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deals:
    """Who computes what, for one list of parameters."""

    whole: tuple[int, ...]
    """Those that this rank holds all of."""
    shared: tuple[Deal, ...]


@torch.no_grad()
def update_matrices(
    parameters: Sequence[Tensor], momenta: Sequence[Tensor], settings: MuonSettings, deals: Deals
) -> None:
    """One step of all `parameters`, which are matrices or stacks of them."""

    def apply(index: int, update: Tensor) -> None:
        rate, decay = settings.learning_rates[index], settings.weight_decays[index]
        _apply(parameters[index], update, rate=rate, decay=decay)

    for index in deals.whole:
        update = _update(parameters[index], momenta[index], settings)
        apply(index, orthogonal(update, settings.steps))
    for deal in deals.shared:
        updates = [_update(parameters[at], momenta[at], settings) for at in deal.matrices]
        results = orthogonal_shards(updates, deal, settings.steps)
        for index, result in zip(deal.matrices, results, strict=True):
            apply(index, result)


def orthogonal(matrices: Tensor, steps: int = trainer_options.NEWTON_SCHULZ_STEPS) -> Tensor:
    """The matrix, or each of a stack, with singular values near 1, by Newton-Schulz.

    Five steps of a quintic, which leave them between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


def orthogonal_shards(
    updates: Sequence[Tensor], deal: Deal, steps: int = trainer_options.NEWTON_SCHULZ_STEPS
) -> list[Tensor]:
    """This rank's parts of the orthogonalised matrices of a deal, given its parts of them."""
    ranks = dist.get_world_size(deal.group)
    given = [update.numel() for update in updates] + [0] * (ranks - len(updates))
    taken = [prod(_shape(box)) for box in deal.boxes] or [0] * ranks
    parts = torch.cat([update.flatten() for update in updates])
    arrived = parts.new_empty(sum(taken))
    dist.all_to_all_single(arrived, parts, taken, given, group=deal.group)
    if deal.boxes:
        matrix = parts.new_empty(deal.shape)
        for box, part in zip(deal.boxes, torch.split(arrived, taken), strict=True):
            matrix[box] = part.view(_shape(box))
        matrix = orthogonal(matrix, steps)
        arrived = torch.cat([matrix[box].flatten() for box in deal.boxes])
    dist.all_to_all_single(parts, arrived, given, taken, group=deal.group)
    pieces = torch.split(parts, given)[: len(updates)]
    return [piece.view_as(update) for piece, update in zip(pieces, updates, strict=True)]


def deal_out(parameters: Sequence[Tensor]) -> Deals:
    """Who orthogonalises which of `parameters`; all ranks call this with theirs."""
    whole: list[int] = []
    shared: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, DTensor) or not _cutting_axes(parameter):
            whole.append(index)
        else:
            key = (parameter.device_mesh, _cutting_axes(parameter))
            shared.setdefault(key, []).append(index)
    deals: list[Deal] = []
    for (mesh, axes), indices in shared.items():
        group = _group(mesh, axes)
        # the costliest first, so that those dealt out together cost alike
        indices.sort(key=lambda index: -_work(parameters[index].shape))
        ranks = dist.get_world_size(group)
        for first in range(0, len(indices), ranks):
            deals.append(_deal(parameters, indices[first : first + ranks], group, axes))
    return Deals(whole=tuple(whole), shared=tuple(deals))


def _deal(
    parameters: Sequence[Tensor], dealt: list[int], group: dist.ProcessGroup, axes: tuple[int, ...]
) -> Deal:
    mine = dist.get_rank(group)
    if mine >= len(dealt):
        return Deal(matrices=tuple(dealt), group=group, boxes=(), shape=())
    parameter = parameters[dealt[mine]]
    assert isinstance(parameter, DTensor)
    shard = local(parameter)
    stack = shard.shape[:-2]  # the same on all ranks of the group
    everyone = _coordinates(parameter.device_mesh, axes)
    boxes = tuple((*map(slice, stack), *box_of(parameter, at)[len(stack) :]) for at in everyone)
    assert _shape(boxes[mine]) == tuple(shard.shape)
    shape = (*stack, *parameter.shape[-2:])
    return Deal(matrices=tuple(dealt), group=group, boxes=boxes, shape=shape)


def _cutting_axes(parameter: DTensor) -> tuple[int, ...]:
    """Mesh axes that split matrices, and not only a stack between them."""
    stacked = parameter.ndim - 2
    return tuple(
        axis
        for axis in split_axes(parameter)
        if parameter.placements[axis].dim >= stacked  # type: ignore[attr-defined]
    )


def _group(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """The ranks that differ from this one along `axes` only; over several, a group of its own."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    ranks = [int(mesh.mesh[at]) for at in _coordinates(mesh, axes)]
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _coordinates(mesh: DeviceMesh, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Of the ranks that differ from this one along `axes` only, the last axis fastest."""
    here = mesh.get_coordinate()
    assert here is not None
    for number in range(prod(mesh.size(axis) for axis in axes)):
        at = list(here)
        for axis in reversed(axes):
            number, at[axis] = divmod(number, mesh.size(axis))
        yield tuple(at)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - (part.start or 0) for part in box)


def _work(shape: torch.Size) -> int:
    """In proportion to the FLOPs of orthogonalising."""
    short, long = sorted(shape[-2:])
    return prod(shape[:-2]) * short * short * (2 * long + short)


def _update(parameter: Tensor, momentum: Tensor, settings: MuonSettings) -> Tensor:
    """Advance the momentum; what is to be orthogonalised, in the dtype in which it is.

    On GPUs bf16, whose products are fast and, by the source, exact enough.
    """
    gradient, buffer = local_gradient(parameter), local(momentum)
    buffer.lerp_(gradient, 1 - settings.momentum)
    # a copy without Nesterov's look, since the buffer is kept
    update = gradient.lerp(buffer, settings.momentum if settings.nesterov else 1.0)
    return update.bfloat16() if update.device.type == "cuda" else update


def _apply(parameter: Tensor, update: Tensor, *, rate: float, decay: float) -> None:
    scale = UPDATE_RMS * sqrt(max(parameter.shape[-2:]))
    shard = local(parameter)
    shard.mul_(1 - rate * decay)
    shard.add_(update.to(shard.dtype), alpha=-rate * scale)
