"""Gradients of parameters kept in 16 bits, summed over the micro-batches of a step in fp32.

torch adds a gradient to `.grad` in the dtype of the parameter. In bf16, which has 8 bits of
significand, a sum of 128 micro-batches loses what is below a 256th of it: 1.2 % of the whole. So
what a micro-batch leaves in `.grad` is moved to an fp32 sum, and the last one gets that sum,
rounded once. It is done parameter by parameter, as soon as its gradient is there (reduced, under
FSDP), so that a rank has 4 bytes for each parameter and not 6.

In a pipeline micro-batches overlap, and which one is the last of a parameter is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ..config import LayoutConfig
from ..torch_versions import behind_weights
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
                    self.move(parameter, is_last=is_last)
        if is_last:
            # of parameters that the last micro-batch did not use
            for unused, total in self._sums.items():
                unused.grad = total.to(unused.dtype)
            self._sums.clear()

    def _take(self, parameter: Tensor) -> None:
        self.move(parameter, is_last=self._is_last)

    @torch.no_grad()
    def move(self, parameter: Tensor, *, is_last: bool) -> None:
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


class PipelineSums:
    """The fp32 sums of a pipeline rank's gradients, of which each micro-batch of a step leaves one
    for each parameter."""

    def __init__(self, parameters: list[nn.Parameter], *, passes: int) -> None:
        self._sums = GradientSums(parameters, after_backward=True)
        self._passes = passes
        self._taken: Counter[Tensor] = Counter()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, stages: Sequence[nn.Module], layout: LayoutConfig) -> PipelineSums | None:
        """Of gradients in 16 bits; None: there are none, or FSDP holds them in the dtype that it
        reduces in. To be made before what reduces the gradients, whose hooks come behind."""
        parameters = [parameter for stage in stages for parameter in half_parameters(stage)]
        if layout.sharding == "fsdp" or layout.num_microbatches == 1 or not parameters:
            return None
        return cls(parameters, passes=layout.num_microbatches)

    def watch(self, stages: Sequence[PipelineStage]) -> None:
        """Take what torch's stages leave by hand, which calls no hook."""
        for stage in stages:
            behind_weights(stage, partial(self._take_all, half_parameters(stage.submod)))

    def begin(self) -> None:
        """Before the first backward pass of a step."""
        self._taken.clear()

    def _take(self, parameter: Tensor) -> None:
        """Take the gradient that a micro-batch has left."""
        self._taken[parameter] += 1
        self._sums.move(parameter, is_last=self._taken[parameter] == self._passes)

    def _take_all(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and self._taken[parameter] < self._passes:
                self._take(parameter)


_sums: WeakKeyDictionary[nn.Module, GradientSums] = WeakKeyDictionary()


def gradient_sums(model: nn.Module, *, after_backward: bool) -> GradientSums:
    """The sums of `model`, made when they are first asked for: its parameters are final by then."""
    if model not in _sums:
        _sums[model] = GradientSums(half_parameters(model), after_backward=after_backward)
    return _sums[model]


def half_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that are trained and kept in 16 bits."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.element_size() < torch.float32.itemsize
    ]
