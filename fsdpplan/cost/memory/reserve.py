"""Reserve: what torch's allocator takes from the device beyond what is allocated.

Memory that was allocated on one CUDA stream is not given to another, so each stream's pool keeps
its own highest level. FSDP gathers on a stream of its own and reduces on another: gathered buffers
and gradient shards never take the place of activations and logits that are gone.

    reserved = (state + highest levels of the streams + used by NCCL) * (1 + fragmentation)

What a collective reads or writes is recorded on NCCL's stream: freed by the program, it comes back
only when that stream has passed, and the program runs ahead. Under sequence parallelism that is the
gathered input of one matmul and the partial output of another; with async TP they are in symmetric
memory instead.

A request that the device refuses is no failure yet: the allocator waits for what is recorded, gives
back every segment in which nothing lives, whatever its stream, and asks again. So the pools' levels
of other moments are there for whom needs them, at the price of asking the driver on every step;
what is left of segments that were split is not.

Sources: torch 2.13 c10/cuda/CUDACachingAllocator.cpp (blocks are found by stream) and
ProcessGroupNCCL.cpp (`recordStream`); torch/distributed/_symmetric_memory;
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_all_gather` and `foreach_reduce`;
FSDP1 torch/distributed/fsdp/_runtime_utils.py, `_unshard` and `_reduce_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdpplan.cost.memory.rank_quantities import Phase


def reserved_overhead_bytes(
    *,
    allocated: int,
    phases: Sequence[Phase],
    peak: Phase,
    recorded_bytes: int,
    fragmentation_fraction: float,
) -> int:
    """Reserved less allocated, at the highest."""
    computed = max(
        phase.total_bytes - phase.gathers_bytes - phase.gradients_bytes for phase in phases
    )
    gathered = max(phase.gathers_bytes for phase in phases)
    reduced = max(phase.gradients_bytes for phase in phases)
    pools = computed + gathered + reduced + recorded_bytes - peak.total_bytes
    return pools + int((allocated + pools) * fragmentation_fraction)


def releasable_bytes(*, allocated: int, overhead: int, lasting_fraction: float) -> int:
    """Part of what is reserved beyond `allocated` that a request which fails gets back: all but the
    fragments beside what lives, a share of it.

    Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp, `malloc`: release_cached_blocks, which
    frees whole segments alone.
    """
    return max(0, overhead - int(lasting_fraction * allocated))
