"""The auxiliary loss in a pipeline, whose stages each know their own mixtures' choices only.

How often each expert was chosen for a micro-batch travels forward beside the activations, and each
stage adds what its own mixtures chose. The last one knows all, and says what presses them (f), for
this micro-batch as without a pipeline. That travels back as the gradient of what came forward: to
torch's stages and schedules it is one tensor more of what they exchange, so under each of them it
is there when a stage begins to go back, and no rank waits for another in another order than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..model.balance import Pressure
from ..model.moe import mixtures
from .pipeline_stages import StageShare


def carried_choices(model: ModelConfig) -> Tensor:
    """Like what travels beside activations: float64, which counts exactly and has gradients."""
    assert model.experts is not None
    return torch.empty(
        model.experts.experts, dtype=torch.float64, device="meta", requires_grad=True
    )


@contextmanager
def pressed_stages(
    stages: Iterable[tuple[StageShare, nn.Module]], pressure: Pressure
) -> Iterator[None]:
    """Let stages take and give choices beside activations, and their mixtures meet the loss in
    backward."""
    handles = []
    for share, stage in stages:
        choices = _Choices(share, stage, pressure)
        # around FSDP's hooks, which cast whatever a stage is given
        handles.append(stage.register_forward_pre_hook(choices.take, prepend=True))
        handles.append(stage.register_forward_hook(choices.give))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Choices:
    """How often each expert was chosen up to and with a stage, for the micro-batch inside of it."""

    def __init__(self, share: StageShare, stage: nn.Module, pressure: Pressure) -> None:
        self._share, self._here, self._pressure = share, mixtures(stage), pressure
        self._given: Tensor | float = 0.0
        self._before = pressure.chosen_in(self._here)

    def take(self, _: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the stage itself is to be given."""
        if not self._share.is_first:
            *given, self._given = given  # type: ignore[assignment]
        self._before = self._pressure.chosen_in(self._here)
        return tuple(given)

    def give(self, _: nn.Module, __: Any, out: Tensor) -> Any:
        """What the stage gives, with the choices beside it where there is another one behind."""
        chosen_E = self._given + (self._pressure.chosen_in(self._here) - self._before).double()
        self._given = 0.0  # of many micro-batches under way each has its own graph
        shares_E = None
        if self._share.is_last:
            shares_E = self._pressure.shares_after(chosen_E.detach())
        return _Turn.apply(out, chosen_E, self._press, shares_E)  # type: ignore[no-untyped-call]

    def _press(self, shares_E: Tensor) -> None:
        self._pressure.press(self._here, shares_E)


class _Turn(torch.autograd.Function):
    """The end of a stage. Its backward pass begins here: with f, of the stage behind or its own."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        chosen_E: Tensor,
        press: Callable[[Tensor], None],
        shares_E: Tensor | None,
    ) -> Any:
        ctx.press, ctx.shares_E = press, shares_E
        # detached: torch's stages cut what they gave off its graph, which views do not allow
        return (out.detach(), chosen_E.detach()) if shares_E is None else out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *shares: Tensor) -> Any:
        (shares_E,) = shares or (ctx.shares_E,)
        ctx.press(shares_E)
        return gradient, shares_E, None, None
