"""What a checkpoint holds of a run: tensors by the names they have in the whole model.

    model.NAME                  parameters and buffers
    optimizer.state.NAME.KEY    what the optimizer keeps for each parameter
    rng.RANK.KIND               generators of random numbers (rng.py)

Settings of the optimizer are not among them: the command line says them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import TrainerError

TensorTree = dict[str, Any]
"""Dicts of dicts of tensors, as torch.distributed.checkpoint takes them."""

Named = list[tuple[tuple[str, ...], Tensor]]
"""Tensors and their keys in a TensorTree."""


def named_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    copies: Mapping[str, str],
    *,
    leaves_frozen: bool = False,
) -> Named:
    """The tensors of a model and of its optimizer, not copied. Tied parameters come once, under
    their first name; those of `copies` under the name of what they are copies of. Those that are
    not trained may be left out."""
    # state_dict, since FSDP's hooks bring gathered parameters back to their shards first.
    names: dict[Tensor, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TrainerError(
                f"the model keeps {name}, which is no tensor: it cannot be saved; keep it as one, "
                "or outside of the model's state"
            )
        if leaves_frozen and isinstance(value, nn.Parameter) and not value.requires_grad:
            continue
        names.setdefault(value, copies.get(name, name))
    of_model: Named = [(("model", name), value.detach()) for value, name in names.items()]
    return of_model + [
        (("optimizer", "state", names[parameter], key), as_tensor(value))
        for parameter, state in optimizer.state.items()
        for key, value in sorted(state.items())
    ]


def tree(named: Named) -> TensorTree:
    """The tensors by their keys; of several with the same ones the first."""
    root: TensorTree = {}
    for (*outer, last), tensor in named:
        inner = root
        for key in outer:
            inner = inner.setdefault(key, {})
        inner.setdefault(last, tensor)
    return root


def equalise_copies(named: Named) -> None:
    """Copy what was read to the tensors that have the same keys."""
    first: dict[tuple[str, ...], Tensor] = {}
    for keys, tensor in named:
        kept = first.setdefault(keys, tensor)
        if kept is not tensor:
            tensor.copy_(kept)


def as_tensor(value: Any) -> Tensor:
    """A value of an optimizer's state."""
    if not isinstance(value, Tensor):
        raise TrainerError(
            f"the optimizer keeps {value!r}, which is no tensor: it cannot be saved; keep it as "
            "one, or leave --checkpoint-dir out"
        )
    return value


def written_values(tensor: Tensor) -> Tensor:
    """What is written of this rank's part of a tensor: of torchao's 8-bit moments values that are
    rounded to the same codes and scales again, to the bit.

    A code is a part of the largest magnitude among 256 values, and the least one, -0.993, also
    stands for a largest one that is negative: read as it is, that would be the largest no longer,
    and all others of its block would be rounded anew. So it is written as the whole of it.
    """
    moments: Any = tensor
    if getattr(tensor, "codes", None) is None or not hasattr(tensor, "signed"):
        return tensor
    values: Tensor = moments.dequantize(tensor.dtype)
    if not moments.signed:
        return values
    scale = moments.scale.repeat_interleave(moments.block_size).view_as(values)
    return torch.where(moments.codes == 0, -scale.to(values.dtype), values)


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that has not stepped make its state: a step of no length, gradients 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0 * group["lr"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class Staging:
    """Copies of this rank's tensors in CPU memory, so that training goes on while they are written.

    The memory is kept from one save to the next (pinned for CUDA, where allocating it costs more
    than copying): as much as parameters and optimizer state take on a rank.
    """

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}

    def take(self, tensors: TensorTree) -> dict[str, Tensor]:
        """This rank's part of each tensor, by its dotted name; waits for the device."""
        taken = {name: self._copy(name, tensor) for name, tensor in flat(tensors)}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = written_values(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        kept = self.copies.get(name)
        if kept is None or (kept.shape, kept.dtype) != (local.shape, local.dtype):
            pinned = local.device.type == "cuda"
            kept = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pinned)
            self.copies[name] = kept
        return kept.copy_(local, non_blocking=True)


def flat(tensors: TensorTree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of all dicts, by the dotted names that torch's checkpoints give them."""
    for key, value in tensors.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
