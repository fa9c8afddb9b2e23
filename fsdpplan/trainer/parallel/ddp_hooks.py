"""Communication hooks of DistributedDataParallel.

Without `from __future__ import annotations`: DDP compares a hook's annotations with the types.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.futures import Future


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Over whom gradients are averaged, and in which dtype."""

    group: dist.ProcessGroup
    dtype: torch.dtype


def reduce_in_dtype(
    state: Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """DDP communication hook: average a bucket in a dtype that is not the gradients' own.

    torch's own `bf16_compress_hook` does so to bf16, but refuses gloo.
    """
    gradients = bucket.buffer()
    sent = gradients.to(state.dtype).div_(state.group.size())
    work = dist.all_reduce(sent, group=state.group, async_op=True)
    assert work is not None
    averaged: Future[torch.Tensor] = work.get_future().then(
        lambda done: gradients.copy_(done.value()[0])
    )
    return averaged
