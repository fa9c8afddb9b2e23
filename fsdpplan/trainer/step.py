"""One training step: the very code that memory and communication are predicted for.

Nothing here reads a value back from the device, so it also runs under FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .clip import clip_gradients
from .config import PlanConfig
from .errors import RankError
from .model.balance import Balance, Balanced, Pressure, balance_experts
from .model.loss import loss_function
from .parallel.assemble import Assembled
from .parallel.data_parallel import gradient_sync
from .parallel.float8 import refresh_scales
from .parallel.local_parameters import hand_over_gradients
from .parallel.tensor_parallel import loss_context
from .parallel.tied_tables import copied_parameters
from .scaler import scaled, step_unless
from .spikes import Spike, SpikeGuard
from .text.packing import (
    MicroBatch,
    counted_fraction,
    divide_gradients,
    model_inputs,
    real_fraction,
)

UNBALANCED = Balance()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step leaves, on the device."""

    loss: Tensor
    """Mean cross-entropy of this rank's sequences."""
    grad_norm: Tensor
    """Norm of all gradients, over all ranks, before clipping."""
    balanced: Balanced | None = None
    """None without experts."""
    spike: Spike | None = None
    """None where spikes are not looked for."""


def forward_backward(
    assembled: Assembled,
    micro_batches: Sequence[MicroBatch],
    plan: PlanConfig,
    pressure: Pressure | None = None,
) -> Tensor:
    """Gradients of the mean loss over `micro_batches`, and of the auxiliary loss of `pressure`;
    returns the mean, 0 on the pipeline ranks that do not have it."""
    if assembled.pipeline is not None:
        return assembled.pipeline.forward_backward(micro_batches, assembled.scaler, pressure)
    (model,) = assembled.parts
    layout = plan.layout
    loss_of = loss_function(plan, micro_batches[0].tokens.device, model)
    losses = []
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with gradient_sync(model, layout, is_last=is_last), loss_context(layout):
            with nullcontext() if pressure is None else pressure.micro_batch():
                # no name for the logits: it would keep them through backward
                loss = loss_of(model(batch.tokens, **model_inputs(batch)), batch.targets)
            loss = loss / len(micro_batches)
            torch.autograd.backward(scaled(loss, assembled.scaler))
        losses.append(loss.detach())
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def require_gradients(model: nn.Module) -> None:
    """Raise if a parameter has none: its weights would stay as they are, and the loss hardly show
    it."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise RankError(
                f"{name} has no gradient after the backward pass: this layout would not train it; "
                "plan another one and report this one"
            )


def train_step(
    assembled: Assembled,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    plan: PlanConfig,
    *,
    clip_norm: float,
    balance: Balance = UNBALANCED,
    guard: SpikeGuard | None = None,
    skips_spikes: bool = False,
) -> StepOutput:
    """Forward and backward of all micro-batches, clipping, update; gradients are freed at the
    end. A step that `guard` finds to be a spike changes no weight where `skips_spikes`."""
    counted, scaler = counted_fraction(micro_batches), assembled.scaler
    pressure = None
    if balance.auxiliary and plan.model.experts is not None:
        weight = 1.0 if counted is None else counted
        weight = weight if scaler is None else weight * scaler.scale
        real = real_fraction(micro_batches)
        pressure = Pressure(
            assembled.model, assembled.meshes, plan, balance, real=real, weight=weight
        )
    loss = forward_backward(assembled, micro_batches, plan, pressure)
    hand_over_gradients(assembled.parts)
    require_gradients(assembled.model)
    if counted is not None:
        divide_gradients(assembled.model, counted)
        loss = loss / counted
    if scaler is not None:
        scaler.unscale(assembled.model)
    grad_norm = clip_gradients(
        assembled.model, assembled.meshes, clip_norm, counted_elsewhere=copied_parameters(plan)
    )
    spike = None if guard is None else guard.judge(loss, grad_norm)
    skipped = spike.is_spike if spike is not None and skips_spikes else None
    if scaler is not None:
        scaler.step(optimizer, grad_norm, skipped=skipped)
    elif skipped is not None:
        step_unless(skipped, optimizer)
    else:
        optimizer.step()
    if plan.training.fp8_all_gather and plan.training.precision == "fp8":
        refresh_scales(assembled.parts)
    optimizer.zero_grad(set_to_none=True)
    balanced = None
    if plan.model.experts is not None:
        balanced = balance_experts(assembled.model, assembled.meshes, plan.model, balance)
    return StepOutput(loss=loss, grad_norm=grad_norm, balanced=balanced, spike=spike)
