"""Loss scaling: gradients in fp16 are multiplied with a large number while they are small.

The scale doubles after 2000 good steps and halves with each step that overflowed, which changes no
weight. Whether one did shows in the norm of all gradients, over which all ranks agree already. No
value is read back, but to skip an optimizer's step that cannot skip on the device itself.

Source: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.2; first
scale, factors and interval as in torch 2.13 torch/amp/grad_scaler.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .optimizer import ShardOptimizer
from .parallel.shards import local
from .private_torch import ambient_fake_mode, scale_all

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
LEAST_SCALE = 2.0**-14
"""Below it gradients overflow whatever the scale: fp16's smallest normal number."""


class LossScaler:
    """The scale, and what it needs to change."""

    def __init__(self, device: torch.device, *, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self.good_steps = torch.zeros((), device=device)
        self.growth_interval = growth_interval

    def unscale(self, model: nn.Module) -> None:
        """Divide all gradients by the scale."""
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        with torch.no_grad():
            scale_all([local(gradient) for gradient in gradients], 1 / self.scale)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        grad_norm: Tensor,
        *,
        skipped: Tensor | None = None,
    ) -> None:
        """Let `optimizer` step unless the norm says that a gradient overflowed, or `skipped` is
        true; adapt the scale."""
        overflowed = ~grad_norm.isfinite()
        step_unless(overflowed if skipped is None else overflowed | skipped, optimizer)
        self._adapt(overflowed)

    def _adapt(self, overflowed: Tensor) -> None:
        good_steps = torch.where(overflowed, 0.0, self.good_steps + 1)
        grows = good_steps >= self.growth_interval
        factor = torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0))
        self.scale.mul_(factor)
        self.good_steps.copy_(torch.where(grows, 0.0, good_steps))

    def load(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's `scaler_state`."""
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state["good_steps"])


def step_unless(skipped: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer` step unless `skipped`, a boolean on the device, is true; where the optimizer
    cannot leave everything as it is by itself, the host reads it, which waits for the device."""
    if isinstance(optimizer, ShardOptimizer) and optimizer.skips_on_device:
        optimizer.step(found_inf=skipped.float())
    elif ambient_fake_mode() is not None or not bool(skipped):
        optimizer.step()


def scaler_state(scaler: LossScaler | None) -> dict[str, float]:
    """What a checkpoint keeps; nothing of no scaler."""
    if scaler is None:
        return {}
    return {"scale": float(scaler.scale), "good_steps": float(scaler.good_steps)}


def scaled(loss: Tensor, scaler: LossScaler | None) -> Tensor:
    """`loss` as it is; with a scaler, the gradient that backward begins with is its scale."""
    if scaler is None:
        return loss
    result: Tensor = _ScaleGradient.apply(loss, scaler.scale)  # type: ignore[no-untyped-call]
    return result


class _ScaleGradient(torch.autograd.Function):
    """Multiplies what backward brings, and leaves forward as it is."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor) -> Tensor:
        # by reference: in a pipeline no step ends between forward and backward
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None
