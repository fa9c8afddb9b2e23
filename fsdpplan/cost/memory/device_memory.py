"""Device memory outside of torch's allocator: the CUDA context, libraries, and NCCL's buffers.

NCCL allocates a communicator's buffers when its first collective runs, so only groups in use
count. Sources: torch 2.13 `ProcessGroupNCCL`; Megatron-LM megatron/core/parallel_state.py;
DeepSpeed deepspeed/runtime/pipe/topology.py.
"""

from __future__ import annotations

from fsdpplan.spec.cluster import DeviceFit
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.runtime import Runtime, runtime_named
from fsdpplan.spec.training import Training

FSDP2 = runtime_named("fsdp2")

MESSAGE_NEIGHBOURS = 2
"""Ranks that a pipeline rank sends to and receives from."""


def communicators(layout: Layout, traits: Runtime = FSDP2) -> int:
    """Process groups that hold buffers: one a mesh axis with more than one rank, and the world.

    Expert parallelism has one for its exchange and one for the experts' shards. Softwares with
    half-precision parameters, all of Megatron's kind, always use the world, take the gradient norm
    over the ranks of a model and tie embeddings over the ends of a pipeline; their messages have a
    communicator for each pair of ranks, and what splits a pipeline's outputs has one more.
    """
    used = (layout.pp > 1) + (layout.dp_replicate > 1) + (layout.shard_ranks > 1) + (layout.tp > 1)
    groups = used + int(used > 1) + int(isinstance(layout.reshard_after_forward, int))
    if layout.expert_ranks > 1:
        groups += 1 + int(layout.shard_ranks > layout.ep)
    if layout.cp > 1 and layout.dp_shard > 1:
        groups += 1
    if traits.half_parameters:
        groups += 1 + int(layout.tp > 1) - int(used > 1)
        if layout.pp > 1:
            groups += 1 + MESSAGE_NEIGHBOURS
            groups += int(layout.tp > 1 and traits.pipeline_outputs == "split")
    return groups


def outside_allocator_bytes(*, layout: Layout, training: Training, fit: DeviceFit) -> int:
    """Context, libraries and the buffers of all communicators."""
    groups = communicators(layout, training.traits)
    return fit.context_bytes + groups * fit.communicator_bytes
