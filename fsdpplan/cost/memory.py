"""Memory: bytes on one rank at the highest point of its step.

    peak = parameter shards + optimizer state + max over phases

Bytes a parameter come from the recipe. FSDP2 with fp32 shards and AdamW: 4 parameter + 4 gradient
+ 8 optimizer = 16, sharded, and transient compute-dtype units on top. The classic mixed-precision
ledger (2 + 2 + 4 + 4 + 4 = 16, or 18 with fp32 gradients) is in `classic_bytes_per_parameter`.

Assumed: steady state (optimizer state exists, gradients are None between steps), fused AdamW (no
temporaries), eager blocks. Checked against real FSDP2 under fake tensors to 3 % in
`tests/ground_truth`; a CUDA peak is not yet measured against it.
"""

from __future__ import annotations

from functools import lru_cache

from fsdpplan.cost.activations import FP32_BYTES
from fsdpplan.cost.ddp_phases import ddp_phases
from fsdpplan.cost.phases import Phase, RankSizes, fsdp_phases
from fsdpplan.cost.pipeline_phases import pipeline_phases
from fsdpplan.cost.shards import Stage, block_size, root_size, stage_elements
from fsdpplan.cost.sizes import rank_sizes
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import MemoryBreakdown
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

ADAM_STATES = 2
"""fp32 tensors of AdamW for each parameter: first and second moment."""


def classic_bytes_per_parameter(*, gradient_bytes: int = 2) -> dict[str, int]:
    """The ledger of classic mixed precision with Adam, in bytes a parameter.

    2 weights + 2 (or 4) gradients + 4 master weights + 4 + 4 moments = 16 (or 18).
    Source: the field's worked example, 70B in 1.12 TB (tests/golden/ledger.toml); the ledger is
    commonly credited to ZeRO (arXiv 1910.02054).
    """
    return {
        "weights": 2,
        "gradients": gradient_bytes,
        "master_weights": 4,
        "first_moment": 4,
        "second_moment": 4,
    }


def fsdp2_bytes_per_parameter() -> dict[str, int]:
    """The ledger of FSDP2 with fp32 shards and AdamW, in bytes a parameter: 16, never 18.

    The compute-dtype copy is gathered unit by unit and freed, so it is not in the ledger.
    """
    return {"parameters": 4, "gradients": 4, "first_moment": 4, "second_moment": 4}


def available_bytes(*, cluster: Cluster, training: Training) -> int:
    """Device memory that a plan may use: all of it less the head-room."""
    return int(cluster.device.memory_bytes * (1 - training.headroom_fraction))


def state_bytes(*, model: Model, layout: Layout, stage: Stage) -> int:
    """fp32 elements times four that a rank keeps of the parameters: one of the ledger's rows."""
    if layout.sharding == "ddp":
        return FP32_BYTES * stage_elements(model=model, stage=stage, tp=layout.tp)
    shard_ranks = layout.shard_ranks
    block = block_size(model=model, tp=layout.tp, shard_ranks=shard_ranks)
    root = root_size(
        model=model,
        tp=layout.tp,
        shard_ranks=shard_ranks,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    )
    return FP32_BYTES * (
        stage.blocks * block.shard_elements(shard_ranks) + root.shard_elements(shard_ranks)
    )


def optimizer_phase(sizes: RankSizes) -> Phase:
    """Gradient norm and fused AdamW: all gradient shards, no temporaries."""
    elements = sizes.blocks * sizes.shard_block_elements + sizes.shard_root_elements
    return Phase(name="optimizer", gradients=FP32_BYTES * elements)


def rank_phases(sizes: RankSizes, layout: Layout) -> list[Phase]:
    """The candidates for the peak, by how the rank shards and whether it is in a pipeline."""
    if layout.sharding != "fsdp":
        return ddp_phases(sizes)
    return fsdp_phases(sizes) if layout.pp == 1 else pipeline_phases(sizes)


def stage_memory(
    *,
    model: Model,
    cluster: Cluster,
    training: Training,
    layout: Layout,
    stage: Stage,
    in_flight_blocks: int,
) -> MemoryBreakdown:
    """Memory of one pipeline rank at its peak."""
    sizes = rank_sizes(
        model=model,
        training=training,
        layout=layout,
        stage=stage,
        in_flight_blocks=in_flight_blocks,
    )
    phases = rank_phases(sizes, layout)
    peak = max([*phases, optimizer_phase(sizes)], key=lambda phase: phase.total_bytes)
    parameters = state_bytes(model=model, layout=layout, stage=stage)
    optimizer = ADAM_STATES * parameters
    fit = cluster.device.fit
    allocated = parameters + optimizer + peak.total_bytes
    return MemoryBreakdown(
        parameters_bytes=parameters,
        gradients_bytes=peak.gradients,
        optimizer_bytes=optimizer,
        unsharded_parameters_bytes=peak.unsharded_parameters,
        unsharded_gradients_bytes=peak.unsharded_gradients,
        activations_bytes=peak.activations,
        logits_bytes=peak.logits,
        temporaries_bytes=peak.temporaries,
        reserved_overhead_bytes=int(allocated * fit.fragmentation_fraction),
        context_bytes=fit.context_bytes + communicators(layout) * fit.communicator_bytes,
        peak_phase=peak.name,
    )


@lru_cache(maxsize=1024)
def communicators(layout: Layout) -> int:
    """Process groups that hold buffers: one a mesh axis with more than one rank, and the world."""
    axes = (layout.pp, layout.dp_replicate, layout.shard_ranks, layout.tp)
    used = sum(ranks > 1 for ranks in axes)
    reshards_to_fewer = isinstance(layout.reshard_after_forward, int)
    return used + int(used > 1) + int(reshards_to_fewer)
