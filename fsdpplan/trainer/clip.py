"""Clipping: the norm of all gradients over all ranks, whatever mesh each parameter is on.

Of each gradient a rank has a part, or a copy that other ranks have, too. Divided by the number of
copies, the squares of all parts add up to the square of the norm, over whichever axes the parts
lie: the ranks of `edp_shard` x `ep`, over which routed experts are spread, are those of `dp_shard`.
So one all-reduce an axis is enough for parameters of all meshes. Replicas are left out: their
gradients are equal by then.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .parallel.mesh import Meshes
from .private_torch import ambient_fake_mode, norms_of, scale_all

ROUNDING = 1e-6
"""Added to the norm that is divided by, as `torch.nn.utils.clip_grad_norm_` does."""


def clip_gradients(
    model: nn.Module, meshes: Meshes, clip_norm: float, *, counted_elsewhere: Collection[str] = ()
) -> Tensor:
    """Scale the gradients down to `clip_norm` in all; returns their norm before.

    `counted_elsewhere` names parameters of which another pipeline stage has the same gradient, and
    counts it. All ranks call this.
    """
    gradients, shares = [], []
    found: dict[tuple[object, ...], int] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            gradients.append(local_part(gradient))
            key: tuple[object, ...] = ()
            if isinstance(gradient, DTensor):
                key = (id(gradient.device_mesh), gradient.placements)
            if key not in found:
                found[key] = copies(gradient, meshes)
            shares.append((0.0 if name in counted_elsewhere else 1.0) / found[key])
    norm = gradient_norm(gradients, shares, meshes)
    scale_all(gradients, (clip_norm / (norm + ROUNDING)).clamp(max=1.0))
    return norm


def gradient_norm(gradients: list[Tensor], shares: list[float], meshes: Meshes) -> Tensor:
    """Norm over all ranks of local `gradients`, of whose squares each rank counts `shares`."""
    device = torch.device(meshes.parameters.device_type)
    norms = torch.stack(norms_of(gradients)) if gradients else torch.zeros(0)
    squares = norms.float() ** 2
    if any(share != 1.0 for share in shares):
        squares = squares * on_device(tuple(shares), norms.device)
    squares = squares.to(device, non_blocking=True)
    total = sum_over(squares, meshes, "dp_shard", "tp").sum()
    return sum_over(total, meshes, "pp").sqrt()


def on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """`numbers` there; copied once, since the host waits for such a copy."""
    # a fake tensor is its mode's alone
    make = _kept_on_device if ambient_fake_mode() is None else torch.tensor
    return make(numbers, device=device)


@lru_cache(maxsize=4)
def _kept_on_device(numbers: tuple[float, ...], *, device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def sum_over(values: Tensor, meshes: Meshes, *axes: str) -> Tensor:
    """`values` of all ranks along those of `axes` that have several, added up axis by axis."""
    mesh = meshes.parameters
    for number, name in enumerate(mesh.mesh_dim_names or ()):
        if name in axes and mesh.size(number) > 1:
            placements: list[Placement] = [Replicate()] * mesh.ndim
            placements[number] = Partial()
            values = DTensor.from_local(values, mesh, placements, run_check=False).full_tensor()
    return values


def local_part(gradient: Tensor) -> Tensor:
    """What this rank has of `gradient`; to write there is to write to `gradient`."""
    if not isinstance(gradient, DTensor):
        return gradient
    with torch.no_grad():
        return gradient.to_local()


def copies(gradient: Tensor, meshes: Meshes) -> int:
    """Ranks of one replica and stage that have the same part of `gradient`."""
    axes = dict(zip(meshes.parameters.mesh_dim_names or (), meshes.parameters.shape, strict=True))
    ranks = axes.get("dp_shard", 1) * axes.get("tp", 1)
    if not isinstance(gradient, DTensor):
        return ranks
    mesh = gradient.device_mesh
    for number, (name, placement) in enumerate(
        zip(mesh.mesh_dim_names or (), gradient.placements, strict=True)
    ):
        if name not in ("pp", "dp_replicate") and not placement.is_replicate():
            ranks //= mesh.size(number)
    return ranks
