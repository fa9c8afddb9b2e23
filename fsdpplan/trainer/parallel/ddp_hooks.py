"""Communication hooks of DistributedDataParallel.

Without `from __future__ import annotations`: DDP compares a hook's annotations with the types.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Over whom gradients are averaged, and in which dtype."""

    group: dist.ProcessGroup
    dtype: torch.dtype


def reduce_low_rank(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """DDP communication hook: torch's own, which sends gradients as two matrices.

    On gloo one bucket after the other: what it does behind a collective waits for another one, and
    with several buckets all of gloo's two threads would.
    """
    reduced: Future[torch.Tensor] = powerSGD_hook(state, bucket)
    if dist.get_backend(state.process_group) == "gloo":
        reduced.wait()
    return reduced


def power_sgd_state(kind: str, group: dist.ProcessGroup) -> PowerSGDState:
    """What torch's PowerSGD hook keeps, of `powersgd:RANK:FIRST`."""
    _, rank, first = kind.split(":")
    return PowerSGDState(
        group,
        matrix_approximation_rank=int(rank),
        start_powerSGD_iter=int(first),
        orthogonalization_epsilon=POWERSGD_EPSILON,
    )


POWERSGD_EPSILON = 1e-8
"""Added to the norm of a column that is divided by it: some gradients are zero at first."""


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
