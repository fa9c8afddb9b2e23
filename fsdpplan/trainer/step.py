"""One training step: the very code that memory and communication are predicted for.

Nothing here reads a value back from the device, so it also runs under FakeTensorMode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .assemble import Assembled
from .batch import MicroBatch
from .clip import clip_gradients
from .config import PlanConfig
from .loss import loss_function
from .parallelize import gradient_sync
from .tensor_parallel import loss_context

FINAL_LEARNING_RATE_FRACTION = 0.1
"""Share of the peak learning rate at which the cosine ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the weights are updated."""

    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    """Largest norm of all gradients together; infinite: not clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step leaves, on the device."""

    loss: Tensor
    """Mean loss of this rank's sequences."""
    grad_norm: Tensor
    """Norm of all gradients, over all ranks, before clipping."""


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Learning rate of the `step`-th step, from 0: linear warm-up, then a cosine to a tenth."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    decay_steps = max(1, recipe.steps - recipe.warmup_steps)
    progress = min(1.0, (step - recipe.warmup_steps) / decay_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    low = FINAL_LEARNING_RATE_FRACTION
    return recipe.learning_rate * (low + (1 - low) * cosine)


def make_optimizer(model: nn.Module, recipe: Recipe, *, fused: bool) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only. `fused` updates in place, one pass, no temporaries."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
        fused=fused,
        foreach=False,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Let the next step use `learning_rate`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def forward_backward(
    assembled: Assembled, micro_batches: Sequence[MicroBatch], plan: PlanConfig
) -> Tensor:
    """Gradients of the mean loss over `micro_batches`; returns that loss, 0 on the pipeline ranks
    that do not have it."""
    if assembled.pipeline is not None:
        return assembled.pipeline.forward_backward(micro_batches)
    (model,) = assembled.parts
    layout = plan.layout
    loss_of = loss_function(layout, micro_batches[0].tokens.device)
    losses = []
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with gradient_sync(model, layout, is_last=is_last), loss_context(layout):
            outputs = model(batch.tokens, **model_inputs(batch))
            loss = loss_of(outputs, batch.targets) / len(micro_batches)
            torch.autograd.backward(loss)
        losses.append(loss.detach())
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def model_inputs(batch: MicroBatch) -> dict[str, Tensor]:
    """What the decoder is given beside the tokens."""
    given = {"positions": batch.positions, "documents": batch.documents}
    return {name: value for name, value in given.items() if value is not None}


def train_step(
    assembled: Assembled,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    plan: PlanConfig,
    *,
    clip_norm: float,
) -> StepOutput:
    """Forward and backward of all micro-batches, clipping, update; gradients are freed at the
    end."""
    loss = forward_backward(assembled, micro_batches, plan)
    grad_norm = clip_gradients(assembled.model, assembled.meshes, clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepOutput(loss=loss, grad_norm=grad_norm)
