"""Buffers of a model built on the meta device: values that no checkpoint holds, computed again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import TrainerError


@torch.no_grad()
def restore_buffers(
    model: nn.Module, missing: Collection[str], *, given: Mapping[str, Tensor]
) -> None:
    """Give values to the `missing` buffers that checkpoints do not hold; raise where one has none.

    In this order: from `given`; by the module's `reset_buffers()`; by building the module again of
    its `config`, which is all that rotary embeddings of Hugging Face take; by the
    `_init_weights(module)` that models of theirs have.
    """
    for path, module in model.named_modules():
        names = {
            name: f"{path}.{name}" if path else name for name in module._non_persistent_buffers_set
        }
        names = {name: whole for name, whole in names.items() if whole in missing}
        for name, whole in dict(names).items():
            if whole in given:
                _copy(module.get_buffer(name), given[whole])
                del names[name]
        if names and not any(_restored(module, names, way) for way in _ways(model)):
            raise TrainerError(
                f"the buffer {next(iter(names.values()))} of {type(module).__name__} has no value "
                "on the meta device and no checkpoint holds it: give materialise(..., buffers={"
                "NAME: TENSOR}), or the module a method reset_buffers()"
            )


def _ways(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    def by_its_method(module: nn.Module) -> None:
        reset = getattr(module, "reset_buffers", None)
        if callable(reset):
            reset()

    def by_its_model(module: nn.Module) -> None:
        initialise = getattr(model, "_init_weights", None)
        if callable(initialise):
            initialise(module)

    yield by_its_method
    yield build_again
    yield by_its_model


def build_again(module: nn.Module) -> None:
    """Copy the buffers of a new module of the same class and `config`, made on the CPU."""
    config = getattr(module, "config", None)
    if config is None or list(module.parameters()):
        return
    make: Any = type(module)
    try:
        with torch.device("cpu"):
            other: nn.Module = make(config)
    except Exception:
        return  # its class takes more than a config
    for name, value in other.named_buffers(recurse=False):
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.shape == value.shape:
            _copy(buffer, value)


def _restored(module: nn.Module, names: Collection[str], way: Callable[[nn.Module], None]) -> bool:
    """Whether `way` wrote all of the named buffers."""
    for name in names:
        mark(module.get_buffer(name))
    way(module)
    return not any(is_marked(module.get_buffer(name)) for name in names)


def mark(buffer: Tensor) -> None:
    """Write what no one would."""
    if buffer.is_floating_point():
        buffer.fill_(torch.nan)
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).min)


def is_marked(buffer: Tensor) -> bool:
    """Whether the mark is still there; of truth values that cannot be told, so it is said to be."""
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    if local.is_floating_point():
        return bool(local.isnan().any())
    return local.dtype == torch.bool or bool((local == torch.iinfo(local.dtype).min).any())


def _copy(buffer: Tensor, value: Tensor) -> None:
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    local.copy_(value)
