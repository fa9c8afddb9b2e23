"""Communication hooks of DistributedDataParallel.

Without `from __future__ import annotations`: DDP compares a hook's annotations with the types.
"""

import torch
import torch.distributed as dist
from torch.futures import Future


def reduce_in_bf16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """DDP communication hook: average a bucket in bf16.

    torch's own `bf16_compress_hook` does so, too, but refuses gloo.
    """
    gradients = bucket.buffer()
    sent = gradients.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None
    averaged: Future[torch.Tensor] = work.get_future().then(
        lambda done: gradients.copy_(done.value()[0])
    )
    return averaged
