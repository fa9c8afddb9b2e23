"""How single modules are split over tensor-parallel ranks, beside what torch has styles for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from ..model.norms import AllHeadsNorm, RMSNorm


class GatherSequence(ParallelStyle):
    """A network's first input, split over the sequence, is gathered once for all its projections,
    and their gradients of it are summed before they are scattered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, *others = inputs
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, (Shard(1),), run_check=False)
            return (x.redistribute(placements=(Replicate(),)), *others)

        module.register_forward_pre_hook(gather)
        return module


class SplitWeight(ParallelStyle):
    """A head that is not called: the loss gathers the sequence and takes the weight's rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameter(module, "weight", device_mesh)
        return module


def mask_padding(head: nn.Module, *, vocab: int) -> None:
    """Let logits of a head's rows beyond `vocab`, which are padding, be -inf: they never win, and
    their gradient is exactly zero."""
    weight, first = head.get_parameter("weight"), 0
    if weight.shape[0] == vocab:
        return
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        first = weight.shape[0] // mesh.size() * mesh.get_local_rank()

    @torch.no_grad()  # they have no gradient by which to undo it
    def mask(_: nn.Module, __: object, logits: Tensor) -> None:
        if isinstance(logits, DTensor):
            logits.to_local()[..., max(0, vocab - first) :] = -torch.inf
        else:  # whole
            logits.data[..., vocab:] = -torch.inf

    head.register_forward_hook(mask)


class SplitPositions(ParallelStyle):
    """A position table that every rank has, of which each looks up its own part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own_part(_: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
            positions = DTensor.from_local(*inputs, mesh, (Replicate(),), run_check=False)
            return positions.redistribute(placements=(Shard(positions.ndim - 1),))

        def as_tensor(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(
            module,
            device_mesh,
            input_fn=own_part,  # type: ignore[arg-type]
            output_fn=as_tensor,  # type: ignore[arg-type]
        )


class SplitAllHeadsNorm(ParallelStyle):
    """A norm over all heads together, of which each rank has its own; nothing for other modules."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, AllHeadsNorm)
        split_parameter(module, "weight", device_mesh)
        module.mesh = device_mesh
        return module


class NarrowProjection(ParallelStyle):
    """A projection that all ranks compute in whole, for heads that are split: what it gives is
    local, and each rank has its heads' part of its gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_tensor(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local(grad_placements=(Partial(),))

        return distribute_module(
            module,
            device_mesh,
            output_fn=as_tensor,  # type: ignore[arg-type]
        )


class NarrowNorm(ParallelStyle):
    """The norm behind a `NarrowProjection`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        distribute_module(module, device_mesh)

        def forward(x: Tensor) -> Tensor:
            weight = module.weight
            assert isinstance(weight, DTensor)
            local = weight.to_local(grad_placements=(Partial(),))
            return F.rms_norm(x, module.normalized_shape, local.to(x.dtype), module.eps)

        module.forward = forward  # type: ignore[method-assign]
        return module


class WideProjection(ColwiseParallel):
    """The projection by columns of what a `NarrowProjection` has given: the ranks' gradients of its
    input stay apart."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_distributed(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            whole: Tensor = AsWhole.apply(*inputs, device_mesh)  # type: ignore[no-untyped-call]
            return (whole,)

        module.register_forward_pre_hook(as_distributed)
        return super()._apply(module, device_mesh)


class AsWhole(Function):
    """A tensor that all ranks have, as a DTensor; its gradient is each rank's own part of a sum.

    `DTensor.from_local` would sum the parts over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(local, mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        assert gradient.placements[0].is_partial()
        return gradient.to_local(), None


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Split a parameter of `module` itself by rows."""
    parameter = module.get_parameter(name)
    module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, (Shard(0),))))
