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

from fsdpplan.cost.activations import FP32_BYTES, block_activations
from fsdpplan.cost.phases import Phase, RankSizes, ddp_phases, fsdp_phases
from fsdpplan.cost.shards import Stage, block_size, root_size, stage_elements, unit_blocks
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import MemoryBreakdown
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES, Training

ADAM_STATES = 2
"""fp32 tensors of AdamW for each parameter: first and second moment."""


def classic_bytes_per_parameter(*, gradient_bytes: int = 2) -> dict[str, int]:
    """The ledger of classic mixed precision with Adam, in bytes a parameter.

    2 weights + 2 (or 4) gradients + 4 master weights + 4 + 4 moments = 16 (or 18).
    Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), section 3.1.
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


def local_tokens(*, training: Training, layout: Layout) -> int:
    """Tokens of one micro-batch on one rank, before sequence parallelism splits them."""
    return layout.micro_batch * -(-training.seq_len // layout.cp)


def rank_sizes(
    *, model: Model, training: Training, layout: Layout, stage: Stage, in_flight_blocks: int
) -> RankSizes:
    """Sizes that the phases of one pipeline rank add up.

    `in_flight_blocks` counts (micro-batch, block) pairs whose activations are alive at the
    schedule's worst moment; without pipelining it is the number of blocks.
    """
    element_bytes = DTYPE_BYTES[training.precision]
    reduce_bytes = DTYPE_BYTES[training.reduce_dtype]
    is_fsdp = layout.sharding == "fsdp"
    shard_ranks = layout.shard_ranks if is_fsdp else 1
    block_unit = block_size(model=model, tp=layout.tp, shard_ranks=shard_ranks)
    root_unit = root_size(
        model=model,
        tp=layout.tp,
        shard_ranks=shard_ranks,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    )
    wrap = min(layout.wrap_blocks, stage.blocks)
    units = len(unit_blocks(blocks=stage.blocks, wrap_blocks=wrap))
    tokens = local_tokens(training=training, layout=layout)
    residual_tokens = -(-tokens // layout.tp) if layout.sequence_parallel else tokens
    residual_element_bytes = element_bytes if is_fsdp else FP32_BYTES
    block = block_activations(
        model=model,
        tokens=tokens,
        seq_len=-(-training.seq_len // layout.cp),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        element_bytes=element_bytes,
        residual_element_bytes=residual_element_bytes,
        mode=layout.activation_checkpointing,
    )
    gathered_unit = wrap * block_unit.padded_elements * element_bytes if is_fsdp else 0
    several = layout.num_microbatches > 1
    holds = is_fsdp and several and layout.gradient_sync == "last"
    head = int(stage.has_head)
    head_elements = -(-model.vocab // layout.tp) * model.hidden
    vocab = -(-model.vocab // layout.tp) if layout.loss_parallel else model.vocab
    shard_elements = stage.blocks * block_unit.shard_elements(
        shard_ranks
    ) + root_unit.shard_elements(shard_ranks)
    return RankSizes(
        units=units,
        unit_blocks=wrap,
        blocks=stage.blocks,
        gathered_unit=gathered_unit,
        kept_unit=_kept_unit_bytes(
            layout=layout,
            gathered_unit=gathered_unit,
            autocast_copy=wrap * _autocast_bytes(block_unit.elements, element_bytes),
        ),
        regathers=is_fsdp and layout.reshard_after_forward != "never",
        unit_gradient=wrap * block_unit.elements * element_bytes,
        reduce_unit=wrap * block_unit.padded_elements * reduce_bytes if is_fsdp else 0,
        held_unit=wrap * block_unit.elements * reduce_bytes if holds else 0,
        gathered_root=root_unit.padded_elements * element_bytes
        if is_fsdp
        else head * _autocast_bytes(head_elements, element_bytes),
        root_gradient=root_unit.elements * element_bytes,
        reduce_root=root_unit.padded_elements * reduce_bytes if is_fsdp else 0,
        held_root=root_unit.elements * reduce_bytes if holds else 0,
        head_gradient=head * head_elements * element_bytes,
        embedding_gradient=_embedding_gradient_bytes(
            model=model, stage=stage, element_bytes=element_bytes
        ),
        gradient_shards=FP32_BYTES * shard_elements,
        gradient_shard_unit=FP32_BYTES * wrap * block_unit.shard_elements(shard_ranks),
        gradients_exist=is_fsdp and several and not holds,
        all_reduce_inputs=FP32_BYTES * shard_elements if _keeps_all_reduce_inputs(layout) else 0,
        block=block,
        other_micro_batches=(in_flight_blocks - stage.blocks) * block.saved_bytes,
        last_residual=head * residual_tokens * model.hidden * residual_element_bytes,
        last_normed=head * tokens * model.hidden * element_bytes,
        logits_elements=head * tokens * vocab,
        element_bytes=element_bytes,
    )


def _embedding_gradient_bytes(*, model: Model, stage: Stage, element_bytes: int) -> int:
    """The table's gradient is made whole on each rank; with a tied head, autograd adds the head's
    to it out of place."""
    if not stage.has_embedding:
        return 0
    copies = 2 if model.tied_embeddings and stage.has_head else 1
    return copies * model.vocab * model.hidden * element_bytes


def _keeps_all_reduce_inputs(layout: Layout) -> bool:
    """FSDP2 frees the all-reduce inputs of HSDP only at the end of the last backward; with two
    micro-batches those of the first are the gradients themselves."""
    return (
        layout.dp_replicate > 1 and layout.gradient_sync == "every" and layout.num_microbatches > 2
    )


def _autocast_bytes(elements: int, element_bytes: int) -> int:
    """Autocast's copy of weights: none when the compute dtype is theirs."""
    return elements * element_bytes if element_bytes < FP32_BYTES else 0


def _kept_unit_bytes(*, layout: Layout, gathered_unit: int, autocast_copy: int) -> int:
    """What stays of a unit's gathered parameters between its forward and its backward."""
    if layout.sharding == "ddp":
        return autocast_copy
    match layout.reshard_after_forward:
        case "never":
            return gathered_unit
        case "always":
            return 0
        case ranks:
            return gathered_unit // ranks


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
    return Phase(name="optimizer", gradients=sizes.gradient_shards)


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
    phases = fsdp_phases(sizes) if layout.sharding == "fsdp" else ddp_phases(sizes)
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
