"""Weights that are the same whatever the sharding: each parameter from its own seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def materialise(
    model: nn.Module, device: torch.device, *, buffers: torch.device | None = None
) -> None:
    """Give a model on the meta device uninitialised memory; tied parameters stay tied. Its buffers
    go to the device `buffers`, where that is another one: parameters alone are offloaded.

    `Module.to_empty` makes one tensor for each name, so names that shared a parameter must be
    joined again.
    """
    first_name_of: dict[nn.Parameter, str] = {}
    ties = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_name_of.setdefault(parameter, name)
        if first != name:
            ties.append((name, first))
    model.to_empty(device=device)
    for name, first in ties:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    for module in model.modules() if buffers is not None else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=buffers))


VOCABULARIES = ("tok_embeddings.weight", "output.weight")
"""Parameters whose rows are tokens', and may be padded."""


@torch.no_grad()
def initialise(
    model: nn.Module,
    *,
    seed: int,
    layers: int,
    copies: Mapping[str, str] | None = None,
    vocab: int | None = None,
) -> None:
    """Fill the reference decoder in place: normal(0, 0.02), the outputs onto the residual stream
    scaled by 1/sqrt(2 layers), norms at one, biases at zero (GPT-2 paper, section 2.3), attention
    sinks and buffers at zero, too.

    Each rank draws every parameter whole, one at a time, and keeps its part. The values depend on
    the parameter's name, the seed and the kind of device, not on the layout. `copies` says whose
    values parameters get that are copies. Rows of tables beyond `vocab` are padding, and zero.
    """
    residual_std = 0.02 / math.sqrt(2 * layers)
    for name, parameter in named_parameters(model):
        if name.endswith(("bias", "sinks")):
            parameter.zero_()
        elif parameter.ndim > 1:
            name = (copies or {}).get(name, name)
            residual = name.endswith(("wo.weight", "w2.weight"))
            std = residual_std if residual else 0.02
            rows = vocab if name in VOCABULARIES else None
            _fill_normal(name, parameter, seed=seed, std=std, rows=rows)
        else:
            parameter.fill_(1.0)
    for buffer in model.buffers():
        buffer.zero_()


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters()` under the names of the model without its DDP wrapper."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module."), parameter


def _fill_normal(
    name: str, parameter: nn.Parameter, *, seed: int, std: float, rows: int | None
) -> None:
    """Draw the first `rows` of a parameter, or all; the others are zero."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    generator = torch.Generator(device=local.device)
    # Of a CPU generator's seed only 32 bits count.
    generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    # in fp32 whatever it is kept in: bf16 parameters are the fp32 ones, rounded
    whole = torch.empty(parameter.shape, dtype=torch.float32, device=local.device)
    whole[:rows].normal_(std=std, generator=generator)
    if rows is not None:
        whole[rows:].zero_()
    local.copy_(part_of(whole, parameter))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `like`; no communication."""
    if not isinstance(like, DTensor):
        return whole
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the parameter's mesh"
    return part_at(whole, coordinate, like.device_mesh, like.placements)


def part_at(
    whole: Tensor, coordinate: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> Tensor:
    """The part of `whole` that is at `coordinate` of `mesh`."""
    # A dimension that tensor parallelism has split is split again by FSDP (`_StridedShard`).
    for axis in sorted(range(len(placements)), key=lambda axis: _is_strided(placements[axis])):
        placement = placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        # As `chunk` splits, the last parts shorter or empty; 1,024 views of each would be too many.
        length = whole.shape[dim]
        part = -(-length // mesh.size(axis))
        begin = min(length, part * coordinate[axis])
        whole = whole.narrow(dim, begin, min(part, length - begin))
    return whole


def _is_strided(placement: Placement) -> bool:
    return hasattr(placement, "split_factor")
