"""Shards: this rank's part of a parameter, and where in the whole each rank's part lies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

Box = tuple[slice, ...]
"""Part of a tensor, one slice a dimension."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, which DTensor may have left placed unlike its parameter
    (whole, or as sums to be made, where only tensor parallelism split the parameter)."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor):
        assert isinstance(gradient, DTensor)
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local(gradient)


def split_axes(tensor: DTensor) -> tuple[int, ...]:
    """Mesh axes of more than one rank over which `tensor` is split."""
    return tuple(
        axis
        for axis, placement in enumerate(tensor.placements)
        if not (placement.is_replicate() or placement.is_partial())
        and tensor.device_mesh.size(axis) > 1
    )


def box_of(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """What the rank at `coordinate` of the mesh holds.

    Inner axes split first: tensor and expert parallelism before FSDP, whatever dimensions they
    split. Parts are chunks of ceil(length / ranks), the last ones shorter or empty, as torch's.
    """
    begins = [0] * tensor.ndim
    lengths = list(tensor.shape)
    for axis in reversed(split_axes(tensor)):
        dim: int = tensor.placements[axis].dim  # type: ignore[attr-defined]
        chunk = -(-lengths[dim] // tensor.device_mesh.size(axis))
        before = min(lengths[dim], chunk * coordinate[axis])
        begins[dim] += before
        lengths[dim] = min(chunk, lengths[dim] - before)
    return tuple(
        slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)
    )


def own_box(tensor: Tensor) -> Box:
    """Where in the whole this rank's part lies."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, length) for length in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the parameter's mesh"
    return box_of(tensor, coordinate)
