"""Environment of the ranks: a variable is set only where the plan gives a reason for it.

NCCL finds its own interfaces, adapters and algorithms, and what was a cure for one version slows
the next one down. So there is no list of NCCL variables here: each line has a reason taken from
the plan, the versions it is for, and gives way to a value that the user has exported.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.emit.job import Job
from fsdpplan.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One line of the environment."""

    name: str
    default: str
    """What it becomes where the user has not exported it, as it stands in double quotes."""
    reason: str
    """Why this plan needs it, and for which versions."""


def environment(*, plan: Plan, job: Job) -> tuple[Variable, ...]:
    """Variables for every rank of the plan, in the order they are written."""
    if plan.cluster.device.kind == "cpu":
        return _threads_of_cpu_ranks()
    return _allocator() + _nccl_log(job)


def _threads_of_cpu_ranks() -> tuple[Variable, ...]:
    """A CPU device of a profile is one process on one core."""
    return (
        Variable(
            name="OMP_NUM_THREADS",
            default="1",
            reason="the plan counts one core a rank; without it each rank would take all cores",
        ),
    )


def _allocator() -> tuple[Variable, ...]:
    """Source: PyTorch's notes on CUDA semantics, memory management."""
    return (
        Variable(
            name="PYTORCH_ALLOC_CONF",
            default="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}",
            reason="blocks are gathered and freed all the time; segments that grow leave fewer "
            "holes, so what is reserved stays near what is allocated (torch >= 2.9)",
        ),
        Variable(
            name="PYTORCH_CUDA_ALLOC_CONF",
            default="$PYTORCH_ALLOC_CONF",
            reason="the same setting's name for torch < 2.9",
        ),
    )


def _nccl_log(job: Job) -> tuple[Variable, ...]:
    if job.nccl_debug is None:
        return ()
    reason = "asked for: NCCL logs what it chose (all versions)"
    return (Variable(name="NCCL_DEBUG", default=job.nccl_debug, reason=reason),)
