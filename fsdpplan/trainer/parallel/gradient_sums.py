"""Gradients of parameters kept in 16 bits, summed over the micro-batches of a step in fp32.

torch adds a gradient to `.grad` in the dtype of the parameter. In bf16, which has 8 bits of
significand, a sum of 128 micro-batches loses what is below a 256th of it: 1.2 % of the whole. So
what a micro-batch leaves in `.grad` is moved to an fp32 sum, and the last one gets that sum,
rounded once. It is done parameter by parameter, as soon as its gradient is there (reduced, under
FSDP), so that a rank has 4 bytes for each parameter and not 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .shards import local


class GradientSums:
    """The fp32 sums of one model's gradients, while a step's micro-batches add to them."""

    def __init__(self, parameters: list[nn.Parameter], *, after_backward: bool) -> None:
        """`after_backward`: a gradient is final only when the whole backward pass is through."""
        self._parameters = parameters
        self._after_backward = after_backward
        self._sums: dict[Tensor, Tensor] = {}
        self._is_last = True
        if not after_backward:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Run one micro-batch, forward and backward."""
        self._is_last = is_last
        try:
            yield
        finally:
            self._is_last = True
        if self._after_backward:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self._move(parameter, is_last=is_last)
        if is_last:
            # of parameters that the last micro-batch did not use
            for unused, total in self._sums.items():
                unused.grad = total.to(unused.dtype)
            self._sums.clear()

    def _take(self, parameter: Tensor) -> None:
        self._move(parameter, is_last=self._is_last)

    @torch.no_grad()
    def _move(self, parameter: Tensor, *, is_last: bool) -> None:
        """Add a gradient to its sum; or, of the last micro-batch, the sum to the gradient."""
        gradient = parameter.grad
        assert gradient is not None
        total = self._sums.pop(parameter, None)
        if total is not None:
            local(total).add_(local(gradient))
        if not is_last:
            self._sums[parameter] = gradient.float() if total is None else total
            parameter.grad = None
        elif total is not None:
            local(gradient).copy_(local(total))


_sums: WeakKeyDictionary[nn.Module, GradientSums] = WeakKeyDictionary()


def gradient_sums(model: nn.Module, *, after_backward: bool) -> GradientSums:
    """The sums of `model`, made when they are first asked for: its parameters are final by then."""
    if model not in _sums:
        parameters = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.element_size() < torch.float32.itemsize
        ]
        _sums[model] = GradientSums(parameters, after_backward=after_backward)
    return _sums[model]
