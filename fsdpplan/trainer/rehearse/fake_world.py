"""A world of any size in one process: ranks that are not there, tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from ..private_torch import fake_tensors, forget_meshes, join_fake_group, own_propagation_mode

__all__ = ["cuda_like_norms", "fake_tensors", "fake_world", "nothing_to_draw"]


@contextmanager
def fake_world(ranks: int, *, rank: int = 0) -> Iterator[None]:
    """A process group of `ranks` of which this process is `rank`, alone.

    Meshes must be made in it but outside of a fake mode: they look into their rank tensor.
    """
    join_fake_group(rank=rank, world=ranks)
    try:
        with own_propagation_mode():
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


class _FusedRMSNorm(torch.autograd.Function):
    """Saves what CUDA's fused RMSNorm saves: input, weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor, epsilon: float) -> Tensor:
    if isinstance(x, DTensor):
        assert isinstance(weight, DTensor)
        local = weight.to_local(grad_placements=[Partial()])
        out = _fused_rms_norm(x.to_local(), shape, local, epsilon)
        return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)
    if torch.is_autocast_enabled("cpu"):
        x, weight = x.float(), weight.float()
    normalised: Tensor = _FusedRMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normalised


def _fused_rms_norm_forward(module: torch.nn.RMSNorm, x: Tensor) -> Tensor:
    return _fused_rms_norm(x, module.normalized_shape, module.weight, module.eps or 0.0)


@contextmanager
def cuda_like_norms() -> Iterator[None]:
    """Replace RMSNorm's composite CPU kernel, which saves two fp32 copies of its input.

    Under autocast to bf16, CUDA computes it in fp32 (torch 2.13, `AT_FORALL_FP32`).
    """
    forward, function = torch.nn.RMSNorm.forward, torch.nn.functional.rms_norm
    torch.nn.RMSNorm.forward = _fused_rms_norm_forward  # type: ignore[assignment, method-assign]
    torch.nn.functional.rms_norm = _fused_rms_norm  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.RMSNorm.forward = forward  # type: ignore[method-assign]
        torch.nn.functional.rms_norm = function


@contextmanager
def nothing_to_draw() -> Iterator[None]:
    """Fake tensors have no numbers: `normal_` writes zeros, whatever generator it is given."""
    original = torch.Tensor.normal_

    def normal_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.zero_()

    torch.Tensor.normal_ = normal_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.normal_ = original  # type: ignore[method-assign]
