"""Replicas of a pipeline rank: gradients averaged in buckets, as DistributedDataParallel does.

DDP itself counts a backward pass as finished when autograd says so. Schedules that split backward
set the gradients by hand, where it would silently reduce nothing (torch 2.13,
torch/distributed/pipelining/_backward.py, `stage_backward_weight`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import LayoutConfig, PlanConfig

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""DDP's."""

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket, where it is not told a size, so that reducing begins early."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    unfinished: int = 0
    work: dist.Work | None = None
    sent: Tensor | None = None
    """What is reduced, where that is another tensor than the gradients."""
    gradients: Tensor | None = None
    """Of all parameters, one after the other."""


class ReplicaGradients:
    """The gradients of a pipeline rank's stages over the replicas."""

    def __init__(
        self, stages: Sequence[nn.Module], plan: PlanConfig, group: dist.ProcessGroup
    ) -> None:
        self._group = group
        self._passes = plan.layout.num_microbatches
        self._sent_dtype = torch.bfloat16 if plan.training.reduce_dtype == "bf16" else torch.float32
        # the order in which backward finishes them
        parameters = [
            parameter
            for stage in reversed(stages)
            for parameter in reversed(list(stage.parameters()))
            if parameter.requires_grad
        ]
        self._buckets = fill_buckets(parameters, plan.layout)
        self._bucket_of = {
            parameter: bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
        self._counted: Counter[Tensor] = Counter()

    def begin(self) -> None:
        """Before the first backward pass of a step."""
        self._counted.clear()
        for bucket in self._buckets:
            bucket.unfinished = len(bucket.parameters)

    def finish(self) -> None:
        """After the last one: reduce what is left, and wait for all."""
        for bucket in self._buckets:
            if bucket.work is None:
                self._reduce(bucket)
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            if bucket.sent is not None and bucket.gradients is not None:
                bucket.gradients.copy_(bucket.sent)
            bucket.work = bucket.sent = bucket.gradients = None

    def _count(self, parameter: Tensor) -> None:
        self._counted[parameter] += 1
        if self._counted[parameter] < self._passes:
            return
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        bucket.unfinished -= 1
        if not bucket.unfinished:
            self._reduce(bucket)

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        """Let the gradients of `bucket` be parts of one tensor, and average that."""
        whole = torch.cat([local_gradient(each).flatten() for each in bucket.parameters])
        start = 0
        for parameter in bucket.parameters:
            part = local_gradient(parameter)
            set_local_gradient(parameter, whole[start : start + part.numel()].view(part.shape))
            start += part.numel()
        sent = whole.to(self._sent_dtype).div_(self._group.size())
        bucket.gradients, bucket.sent = whole, None if sent is whole else sent
        bucket.work = dist.all_reduce(sent, group=self._group, async_op=True)


def fill_buckets(parameters: Sequence[nn.Parameter], layout: LayoutConfig) -> list[Bucket]:
    """`parameters` in this order, a bucket at a time until it has reached its limit.

    Source: torch 2.13 `compute_bucket_assignment_by_size`, and
    torch/nn/parallel/distributed.py for the limits.
    """
    limit = layout.ddp_bucket_bytes
    first = FIRST_BUCKET_BYTES if limit == DEFAULT_BUCKET_BYTES else limit
    buckets = [Bucket()]
    size_bytes = 0
    for parameter in parameters:
        if size_bytes >= (first if len(buckets) == 1 else limit):
            buckets.append(Bucket())
            size_bytes = 0
        buckets[-1].parameters.append(parameter)
        size_bytes += local_elements(parameter) * parameter.element_size()
    return buckets


def local_elements(parameter: nn.Parameter) -> int:
    """Elements of this rank's part."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient, laid out as the parameter is."""
    gradient = parameter.grad
    assert gradient is not None, "every parameter of a stage takes part in its forward pass"
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return gradient.to_local()


def set_local_gradient(parameter: nn.Parameter, local: Tensor) -> None:
    """Let `local` be this rank's part of the gradient."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        local = DTensor.from_local(
            local,
            gradient.device_mesh,
            gradient.placements,
            run_check=False,
            shape=gradient.shape,
            stride=gradient.stride(),
        )
    parameter.grad = local
