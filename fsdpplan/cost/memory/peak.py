"""Memory: bytes on one rank at the highest point of its step.

    peak = parameter shards + optimizer state + max over phases

Bytes a parameter come from the `ledger`, what is added to them in a step from the phases: of FSDP
units, of whole parameters, or of a pipeline rank. Beyond what is allocated, torch's allocator
reserves: see `reserve`; and the device holds what is outside of it.

Assumed: steady state (optimizer state exists), fused AdamW (no temporaries). Checked against real
FSDP2 under fake tensors in `tests/ground_truth`.

Device memory outside of torch's allocator: the CUDA context, libraries, and NCCL's buffers.

NCCL allocates a communicator's buffers when its first collective runs, so only groups in use
count. Sources: torch 2.13 `ProcessGroupNCCL`; Megatron-LM megatron/core/parallel_state.py;
DeepSpeed deepspeed/runtime/pipe/topology.py.

Reserve: what torch's allocator takes from the device beyond what is allocated.

Memory that was allocated on one CUDA stream is not given to another, so each stream's pool keeps
its own highest level. FSDP gathers on a stream of its own and reduces on another: gathered buffers
and gradient shards never take the place of activations and logits that are gone.

    reserved = (state + highest levels of the streams + used by NCCL) * (1 + fragmentation)

Fragmentation is less where segments grow (`expandable_segments`), and none on one stream.

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
from dataclasses import replace
from functools import lru_cache

from fsdpplan.cost.band import most_bytes, peak_factor, with_band
from fsdpplan.cost.kernels.optimizer import muon_temporary_bytes
from fsdpplan.cost.memory.activations import mask_bytes
from fsdpplan.cost.memory.fsdp_moments import fsdp_phases
from fsdpplan.cost.memory.ledger import (
    StateBytes,
    adds_in_fp32,
    checkpoint_peak_bytes,
    initialization_peak_bytes,
    makes_gradients,
    rank_state,
    sums_fp32_gradients,
)
from fsdpplan.cost.memory.pipeline_moments import pipeline_phases
from fsdpplan.cost.memory.rank_quantities import RankSizes
from fsdpplan.cost.memory.replica_moments import replica_phases
from fsdpplan.cost.memory.sizes import rank_sizes
from fsdpplan.cost.model.formats import FP32_BYTES, Ways, formats, memory_ways
from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.play.heap import Phase
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Cluster, Device, DeviceFit
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, MemoryBreakdown
from fsdpplan.spec.runtime import Runtime, runtime_named
from fsdpplan.spec.training import Training, program_named

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


def grows_segments(*, training: Training, device: Device) -> bool:
    """Whether the allocator's segments grow: where the launcher sets `expandable_segments`, on
    NVIDIA's GPUs.

    Sources: `emit/nccl/node.py`, which sets it in our scripts; torchtitan run_train.sh.
    """
    is_set = training.traits.grows_segments and program_named(training.program).grows_segments
    return is_set and device.kind == "cuda" and device.vendor == "nvidia"


def fragments_fraction(case: Case) -> float:
    """Reserved beyond what is allocated and in other streams' pools, as a share of both.

    Segments that grow have no fragments of their own: what they add is of pools that were high at
    other moments than the steps of the model have, and nothing on one stream. Source: 30 steps on
    one H100, 26.61 GiB reserved and allocated; torchtitan's four of `growing_segments`.
    """
    fit, layout = case.cluster.device.fit, case.layout
    if fit.growing_fragmentation_fraction is None or not grows_segments(
        training=case.training, device=case.cluster.device
    ):
        return fit.fragmentation_fraction
    is_one_stream = layout.sharding != "fsdp" and layout.tp == layout.pp == 1
    return 0.0 if is_one_stream else fit.growing_fragmentation_fraction


def releasable_bytes(*, allocated: int, overhead: int, lasting_fraction: float) -> int:
    """Part of what is reserved beyond `allocated` that a request which fails gets back: all but the
    fragments beside what lives, a share of it.

    Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp, `malloc`: release_cached_blocks, which
    frees whole segments alone.
    """
    return max(0, overhead - int(lasting_fraction * allocated))


UNITS_IN_FLIGHT = 2
"""The unit at work and the one that is gathered, or reduced, beside it."""


# CPUOffloadPolicy keeps parameter shards, gradient shards and the optimizer in pinned host memory:
# a unit's shard is copied to the device for its all-gather, its reduced gradient back to the host,
# and the optimizer runs on the CPU. What HSDP keeps of its reductions stays on the device. Source:
# torch 2.13 torch/distributed/fsdp/_fully_shard, `FSDPParam.all_gather_inputs` and
# `foreach_reduce`.


def require_offloadable(layout: Layout) -> None:
    """Raise SpecError where nothing would be offloaded."""
    if layout.offload == "cpu" and layout.sharding != "fsdp":
        raise SpecError(
            f"offload cpu is that of FSDP2, which sharding {layout.sharding} is not: use "
            "--sharding fsdp, or --offload none"
        )


def staging_bytes(sizes: RankSizes, element_bytes: int) -> int:
    """Shards of units on their way to or from the host."""
    ends = (sizes.ends.tables, sizes.ends.head, sizes.ends.root)
    unit = max(
        sizes.unit_blocks * sizes.shard_block_elements, *(end.shard_elements for end in ends)
    )
    return UNITS_IN_FLIGHT * unit * element_bytes


def host_gradient_bytes(*, training: Training, layout: Layout) -> int:
    """Bytes a parameter of the gradients in host memory, with the fp32 sums that they add up in."""
    sums = FP32_BYTES * int(adds_in_fp32(training=training, layout=layout))
    return formats(training=training, layout=layout).kept_gradient + sums


def host_bytes(*, state: StateBytes, sizes: RankSizes, layout: Layout, element_bytes: int) -> int:
    """Parameters, gradients and optimizer state of one rank in host memory."""
    if layout.offload == "none":
        return 0
    elements = sizes.blocks * sizes.shard_block_elements + sizes.ends.shard_elements
    return state.parameters + state.optimizer + element_bytes * elements


@lru_cache(maxsize=4096)
def node_host_bytes(case: Case) -> int:
    """What the ranks of one node keep in its memory: of nodes that differ, the fullest.

    Stages of a pipeline are the outermost axis, so a node has neighbouring ones.
    """
    layout = case.layout
    if layout.offload == "none":
        return 0
    each = []
    for stage in pipeline_ranks(model=case.model, layout=layout):
        state = rank_state(case, stage)
        each_bytes = host_gradient_bytes(training=case.training, layout=layout)
        gradients = each_bytes * state.held_parameters
        each.append(state.parameters + state.optimizer + gradients)
    of_stage, of_node = layout.world // layout.pp, case.cluster.gpus_per_node
    nodes = (range(first, first + of_node) for first in range(0, layout.world, of_node))
    if of_stage % of_node == 0:
        return of_node * max(each)
    return max(sum(each[rank // of_stage] for rank in ranks) for ranks in nodes)


@lru_cache(maxsize=64)
def available_bytes(*, cluster: Cluster, training: Training) -> int:
    """The highest predicted peak that a plan may have: what is expected of it leaves the head-room
    free, and has the chance to fit that is asked for."""
    device = cluster.device
    free = int(device.memory_bytes * (1 - training.headroom_fraction) / peak_factor(device))
    return min(free, most_bytes(device=device, fits_fraction=training.fits_fraction))


def rank_phases(sizes: RankSizes, layout: Layout) -> list[Phase]:
    """The candidates for the peak, by how the rank shards and whether it is in a pipeline."""
    if layout.sharding != "fsdp":
        return replica_phases(sizes)
    return fsdp_phases(sizes) if layout.pp == 1 else pipeline_phases(sizes)


def optimizer_phase(
    sizes: RankSizes,
    *,
    state: StateBytes,
    training: Training,
    layout: Layout,
    optimizer_temporaries: int = 0,
) -> Phase:
    """Gradient norm and AdamW: all gradient shards, and no temporaries where it is one kernel;
    `optimizer_temporaries` are what Muon needs beside.

    Lists of operators have one tensor more for each parameter. Half-precision gradients of the
    optimizer's part are copied to fp32 for it; those of softwares that keep no buffer of all
    gradients are joined in one piece first. Operators over one flat tensor have two more: the root
    of the second moment, and what it is divided into; the gradients that were joined are gone.

    Source: DeepSpeed runtime/zero/stage_1_and_2.py, `step`; InternEvo hybrid_zero_optim.py;
    torch 1.13 torch/optim/adamw.py, `_single_tensor_adamw`.
    """
    of = formats(training=training, layout=layout)
    of_lists = FP32_BYTES * state.optimizer_parameters * int(training.traits.foreach_optimizer)
    of_lists += optimizer_temporaries
    if training.traits.flat_optimizer:
        fp32 = FP32_BYTES * state.optimizer_parameters
        return Phase(name="optimizer", gradients_bytes=fp32, temporaries_bytes=2 * fp32)
    if layout.offload == "cpu":
        return Phase(name="optimizer")
    if layout.sharding == "fsdp":
        elements = sizes.blocks * sizes.shard_block_elements + sizes.ends.shard_elements
        kept = of.kept_gradient
        if not (sums_fp32_gradients(training) or training.half_states):
            kept += of.computed
        return Phase(name="optimizer", gradients_bytes=kept * elements, temporaries_bytes=of_lists)
    copies = of_lists
    if not sums_fp32_gradients(training) and not training.half_states:
        joined = of.computed * int(training.traits.half_gradients)
        copies += (joined + FP32_BYTES) * state.optimizer_parameters
    # backward has made them on the stream that computes, whose pool they stay in
    made = makes_gradients(training=training, layout=layout)
    return Phase(
        name="optimizer",
        gradients_bytes=state.gradients,
        unsharded_gradients_bytes=of.kept_gradient * state.held_parameters if made else 0,
        temporaries_bytes=copies,
    )


def stage_phases(case: Case, stage: Stage, *, sizes: RankSizes, state: StateBytes) -> list[Phase]:
    """All candidates for the peak of a pipeline rank, the optimizer's last."""
    training, layout = case.training, case.layout
    return [
        *rank_phases(sizes, layout),
        optimizer_phase(
            sizes,
            state=state,
            training=training,
            layout=layout,
            optimizer_temporaries=muon_temporary_bytes(case, stage)
            if training.optimizer == "muon"
            else 0,
        ),
    ]


def stage_memory(case: Case, stage: Stage, *, in_flight_blocks: int) -> MemoryBreakdown:
    """Memory of one pipeline rank at its peak; a search asks for the same rank again and again, and
    searches of one question on machines of other rates do."""
    return _stage_memory(memory_ways(case), stage, in_flight_blocks)


@lru_cache(maxsize=16384)
def _stage_memory(ways: Ways, stage: Stage, in_flight_blocks: int) -> MemoryBreakdown:
    case = ways.case
    training, layout = case.training, case.layout
    require_offloadable(layout)
    sizes = rank_sizes(case, stage, in_flight_blocks=in_flight_blocks)
    state = rank_state(case, stage)
    phases = stage_phases(case, stage, sizes=sizes, state=state)
    peak = max(phases, key=lambda phase: phase.total_bytes)
    on_device = layout.offload == "none"
    parameters = state.parameters if on_device else 0
    optimizer = state.optimizer if on_device else 0
    element_bytes = formats(training=training, layout=layout).kept_gradient
    staged = 0 if on_device else staging_bytes(sizes, element_bytes)
    gradients = peak.gradients_bytes + staged
    fit, fragments = case.cluster.device.fit, fragments_fraction(case)
    masks = mask_bytes(case, stage)
    allocated = parameters + optimizer + gradients + peak.total_bytes - peak.gradients_bytes + masks
    overhead = reserved_overhead_bytes(
        allocated=allocated,
        phases=phases,
        peak=peak,
        recorded_bytes=sizes.recorded_bytes,
        fragmentation_fraction=fragments,
    )
    return MemoryBreakdown(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        unsharded_parameters_bytes=peak.unsharded_parameters_bytes,
        unsharded_gradients_bytes=peak.unsharded_gradients_bytes,
        activations_bytes=peak.activations_bytes + masks,
        logits_bytes=peak.logits_bytes,
        temporaries_bytes=peak.temporaries_bytes,
        reserved_overhead_bytes=overhead,
        context_bytes=outside_allocator_bytes(layout=layout, training=training, fit=fit),
        peak_phase=peak.name,
        host_bytes=host_bytes(
            state=state,
            sizes=sizes,
            layout=layout,
            element_bytes=host_gradient_bytes(training=training, layout=layout),
        ),
        initialization_peak_bytes=initialization_peak_bytes(case, stage),
        checkpoint_peak_bytes=checkpoint_peak_bytes(case, stage),
        checkpoint_host_bytes=state.parameters + state.optimizer,
        releasable_bytes=releasable_bytes(
            allocated=allocated,
            overhead=overhead,
            lasting_fraction=fit.lasting_fragments_fraction * fragments,
        ),
    )


def rank_memory(case: Case) -> MemoryBreakdown:
    """Memory of the fullest pipeline rank, and the peaks of all of them; of a run whose precision
    changes, in the part that needs more."""
    if case.training.precision_switch != "none":
        parts = [rank_memory(each) for _, each in case.phases]
        return max(parts, key=lambda one: one.peak_device_bytes)
    model, layout = case.model, case.layout
    stages = pipeline_ranks(model=model, layout=layout)
    in_flight = in_flight_blocks(model=model, layout=layout)
    breakdowns: dict[tuple[Stage, int], MemoryBreakdown] = {}
    peaks = []
    for key in zip(stages, in_flight, strict=True):
        if key not in breakdowns:
            breakdowns[key] = stage_memory(case, key[0], in_flight_blocks=key[1])
        peaks.append(breakdowns[key].peak_device_bytes)
    fullest = max(breakdowns.values(), key=lambda one: one.peak_device_bytes)
    described = replace(fullest, stage_peak_device_bytes=tuple(peaks))
    return with_band(described, device=case.cluster.device)
