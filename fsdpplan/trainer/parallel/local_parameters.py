"""DDP beside tensor parallelism: DTensors' local parts as parameters that DDP can reduce.

DDP reduces plain tensors only. So it wraps a module whose parameters are this rank's parts, over
the same memory as the model's own DTensors, and which calls the model with DTensors made of them.
The model keeps its parameters, for the optimizer, the gradient norm and checkpoints, and is handed
their gradients at the end of a step's backward passes. (DDP's own way, `device_mesh`, would turn
the model's parameters into plain tensors, which recomputation in backward would then meet.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call


class LocalParameters(nn.Module):
    """A model as DDP may see it: plain parameters, and the same call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.called = (model,)  # in a tuple: its parameters are not to be found
        self.names = [name for name, _ in model.named_parameters()]
        self.locals = nn.ParameterList(
            nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)
            for parameter in model.parameters()
        )

    def forward(self, *args: Any, **given: Any) -> Any:
        (model,) = self.called
        return functional_call(model, {name: self.value(name) for name in self.names}, args, given)

    def value(self, name: str) -> Tensor:
        """The parameter of that name as the model is called with; gradients of it come here."""
        (model,) = self.called
        parameter = model.get_parameter(name)
        shared = [model.get_parameter(each) is parameter for each in self.names]
        return as_distributed(self.locals[shared.index(True)], parameter)

    def hand_over(self) -> None:
        """Give the model's parameters the gradients of this step."""
        (model,) = self.called
        for name, local in zip(self.names, self.locals, strict=True):
            if local.grad is not None:
                parameter = model.get_parameter(name)
                parameter.grad = as_distributed(local.grad, parameter)
                local.grad = None


def current_parameter(module: nn.Module, name: str) -> Tensor:
    """A parameter as the forward pass under way has it."""
    if isinstance(module, LocalParameters):
        return module.value(name)
    return module.get_parameter(name)


def has_distributed_parameters(model: nn.Module) -> bool:
    """Whether some of the model's parameters are DTensors."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def hand_over_gradients(parts: Iterable[nn.Module]) -> None:
    """After the last backward pass of a step: the gradients to the parameters of the model, laid
    out as these are; sums over tensor-parallel ranks that are still to be made are made."""
    for part in parts:
        # FSDP's has none, and a walk over all modules in each step is dear
        modules = () if isinstance(part, FSDPModule) else part.modules()
        seen = next((m for m in modules if isinstance(m, LocalParameters)), None)
        if seen is not None:
            seen.hand_over()
            continue
        for parameter in part.parameters():
            gradient = parameter.grad
            if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
                continue
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def local_of(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, in the same memory."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def as_distributed(local: Tensor, like: Tensor) -> Tensor:
    """`local` as a tensor laid out as `like`; gradients of it are laid out so, too."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
