"""Collectives that autograd goes through: what is sent forward, its gradient is sent back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh


def sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`x`, equal on the ranks of `mesh`, each of which computes a part of its gradient."""
    same: Tensor = _SumGradient.apply(x, mesh)  # type: ignore[no-untyped-call]
    return same


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' `x`, of which each goes on with its own part of the work."""
    total: Tensor = _SumOverRanks.apply(x, mesh)  # type: ignore[no-untyped-call]
    return total


def exchange_rows(x: Tensor, sent: list[int], received: list[int], mesh: DeviceMesh) -> Tensor:
    """The first `sent` rows go to the first rank of `mesh`, the next to the second, and so on; as
    many as `received` come from each."""
    arrived: Tensor = _ExchangeRows.apply(x, sent, received, mesh)  # type: ignore[no-untyped-call]
    return arrived


def _all_reduced(x: Tensor, mesh: DeviceMesh) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    return total


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: FunctionCtx, x: Tensor, mesh: DeviceMesh) -> Tensor:
        context.mesh = mesh  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(context: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradient, context.mesh), None  # type: ignore[attr-defined]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: FunctionCtx, x: Tensor, mesh: DeviceMesh) -> Tensor:
        context.mesh = mesh  # type: ignore[attr-defined]
        return _all_reduced(x, mesh)

    @staticmethod
    def backward(context: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradient, context.mesh), None  # type: ignore[attr-defined]


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        context: FunctionCtx, x: Tensor, sent: list[int], received: list[int], mesh: DeviceMesh
    ) -> Tensor:
        context.way_back = received, sent, mesh  # type: ignore[attr-defined]
        return _exchanged(x, sent, received, mesh)

    @staticmethod
    def backward(context: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, *context.way_back), None, None, None  # type: ignore[attr-defined]


def _exchanged(x: Tensor, sent: list[int], received: list[int], mesh: DeviceMesh) -> Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=mesh.get_group())
    return arrived
