"""Weights that are the same whatever the sharding: each parameter from its own seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..parallel.shards import local, own_box
from . import nf4
from .adapters import A, B, FrozenLinear


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
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fill the reference decoder in place: normal(0, 0.02), the outputs onto the residual stream
    scaled by 1/sqrt(2 layers), norms at one, biases at zero (GPT-2 paper, section 2.3), attention
    sinks and buffers at zero, too. Adapters begin as PEFT's: A uniform within 1/sqrt(inputs), which
    is Kaiming's with a = sqrt(5), and B at zero.

    Each rank draws every parameter whole, one at a time, and keeps its part. The values depend on
    the parameter's name, the seed and the kind of device, not on the layout. `copies` says whose
    values parameters get that are copies. Rows of tables beyond `vocab` are padding, and zero. What
    is quantised is rounded to `dtype` before.
    """
    residual_std = 0.02 / math.sqrt(2 * layers)

    def std_of(name: str) -> float:
        return residual_std if name.endswith(("wo.weight", "w2.weight")) else 0.02

    for name, parameter in named_parameters(model):
        if name.endswith(("bias", "sinks")):
            parameter.zero_()
        elif is_adapter(name) or is_quantised(name):
            pass
        elif parameter.ndim > 1:
            name = (copies or {}).get(name, name)
            rows = vocab if name in VOCABULARIES else None
            _fill_normal(name, parameter, seed=seed, std=std_of(name), rows=rows)
        else:
            parameter.fill_(1.0)
    for name, layer in quantised_layers(model):
        device, std = local(layer.codes).device, std_of(name)
        whole = _whole_normal(name, layer.whole_shape, device, seed=seed, std=std)
        # as an unquantised base is kept, of the same values
        fill_quantised(layer, whole.to(dtype))
    initialise_adapters(model, seed=seed)
    for buffer in model.buffers():
        buffer.zero_()


@torch.no_grad()
def initialise_adapters(model: nn.Module, *, seed: int) -> None:
    """Draw A, and let B be zero, whatever the layout."""
    for name, parameter in named_parameters(model):
        if name.endswith(f".{B}"):
            parameter.zero_()
        elif name.endswith(f".{A}"):
            mine = local(parameter)
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=mine.device)
            bound = 1 / math.sqrt(parameter.shape[1])
            whole.uniform_(-bound, bound, generator=_generator(name, mine.device, seed=seed))
            mine.copy_(part_of(whole, parameter))


def is_adapter(name: str) -> bool:
    """Whether that is the name of a parameter of adapters."""
    return name.endswith((f".{A}", f".{B}"))


def is_quantised(name: str) -> bool:
    """Whether that is the name of a part of a matrix in NF4."""
    return name.rpartition(".")[2] in nf4.PARTS


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, FrozenLinear]]:
    """(name that its weight would have, layer) of those whose weight is in NF4."""
    for path, layer in model.named_modules():
        if isinstance(layer, FrozenLinear) and layer.is_quantised:
            yield f"{path}.weight".removeprefix("module."), layer


@torch.no_grad()
def fill_quantised(layer: FrozenLinear, whole: Tensor) -> None:
    """Give a layer in NF4 this rank's part of the weight `whole`, on the layer's device."""
    (own,) = own_box(layer.codes)
    stored = nf4.quantise(whole, own)
    local(layer.codes).copy_(stored.codes)
    for parameter, values in (
        (layer.block_scales, stored.block_scales),
        (layer.scales, stored.scales),
    ):
        local(parameter).copy_(part_of(values, parameter))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters()` under the names of the model without its DDP wrapper."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module."), parameter


def _fill_normal(
    name: str, parameter: nn.Parameter, *, seed: int, std: float, rows: int | None
) -> None:
    """Draw the first `rows` of a parameter, or all; the others are zero."""
    mine = local(parameter)
    whole = _whole_normal(name, parameter.shape, mine.device, seed=seed, std=std, rows=rows)
    mine.copy_(part_of(whole, parameter))


def _whole_normal(
    name: str,
    shape: torch.Size,
    device: torch.device,
    *,
    seed: int,
    std: float,
    rows: int | None = None,
) -> Tensor:
    # in fp32 whatever it is kept in: bf16 parameters are the fp32 ones, rounded
    whole = torch.empty(shape, dtype=torch.float32, device=device)
    whole[:rows].normal_(std=std, generator=_generator(name, device, seed=seed))
    if rows is not None:
        whole[rows:].zero_()
    return whole


def _generator(name: str, device: torch.device, *, seed: int) -> torch.Generator:
    generator = torch.Generator(device=device)
    # Of a CPU generator's seed only 32 bits count.
    generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return generator


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
