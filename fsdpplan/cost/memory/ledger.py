"""Ledger: what a rank keeps between steps of parameters, gradients and optimizer state.

Bytes a parameter follow from what the software keeps. fp32 parameters with AdamW: 4 parameter + 4
gradient + 8 optimizer = 16. Half-precision parameters with fp32 masters: 2 parameter + 2 or 4
gradient + 12 optimizer = 16 or 18. All in half precision, without masters: 2 + 2 + 4 = 8. FSDP
shards all of it, ZeRO-2 gradients and optimizer, ZeRO-1 the optimizer alone. With `offload: cpu`
the shards and the optimizer are in host memory.

Start memory: the device's peaks before the first step, and while a checkpoint is written.

FSDP2 builds on the meta device, so only shards are ever made; the reference trainer draws each
parameter whole, one at a time, to fill them. FSDP1 makes a unit whole and flattens it. DDP makes
the model, then buckets for all gradients; one replica alone has no DDP. Softwares with
half-precision parameters make the masters and gradient buffers of the ledger before they train.

A checkpoint by torch.distributed.checkpoint writes what the rank holds: its state dictionary refers
to shards and copies none on the device; FSDP1 gathers unit after unit for it.

Sources: fsdpplan.trainer.model.weights; torch 2.13 torch/distributed/checkpoint/state_dict.py,
torch/nn/parallel/distributed.py, torch/distributed/fsdp/_state_dict_utils.py.

Gradient sizes: in which form gradients live from their making to the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdpplan.cost.kernels.optimizer import muon_elements
from fsdpplan.cost.memory.activations import WeightGradientsOf
from fsdpplan.cost.model.formats import FP32_BYTES, formats, low_rank, sums_in_reduce_dtype
from fsdpplan.cost.model.params import (
    block_tensors,
    embedding_tensors,
    head_tensors,
    trains_ends,
)
from fsdpplan.cost.model.shards import (
    Stage,
    block_kinds,
    root_size,
    shares_table,
    stage_elements,
    stage_frozen_bytes,
    stage_shapes,
    stage_shard_elements,
    unit_size,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training

ADAM_STATES = 2
"""fp32 tensors of AdamW for each parameter: first and second moment."""

BLOCK_OF_8BIT_ELEMENTS = 256
"""Elements of a moment in 8 bits that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that one rank keeps from step to step, wherever they are."""

    parameters: int
    """Shards or copies that forward reads."""
    gradients: int
    """Gradients and buffers that are there all the time; 0 under FSDP, which frees them."""
    optimizer: int
    """Moments, and fp32 masters where parameters are in half precision."""
    held_parameters: int
    """Elements of `parameters` that are trained."""
    optimizer_parameters: int
    """Parameters that this rank's optimizer updates."""
    frozen: int = 0
    """Part of `parameters` that is not trained, as it is stored."""


@lru_cache(maxsize=32768)
def rank_state(case: Case, stage: Stage) -> StateBytes:
    """The ledger of one pipeline rank."""
    training, layout = case.training, case.layout
    whole = stage_elements(model=case.model, stage=stage, tp=layout.tp, ep=layout.ep)
    shard = _shard_elements(case, stage, whole)
    held = shard if layout.sharding == "fsdp" else whole
    updated = whole if layout.sharding == "ddp" else shard
    masters = FP32_BYTES if training.traits.half_parameters else 0
    frozen = 0
    if training.adapters is not None:
        ranks = layout.shard_ranks if layout.sharding == "fsdp" else 1
        frozen = stage_frozen_bytes(model=case.model, stage=stage, tp=layout.tp, shard_ranks=ranks)
    return StateBytes(
        parameters=held * formats(training=training, layout=layout).resident + frozen,
        gradients=_resident_gradient_bytes(case, stage, whole=whole, shard=shard),
        optimizer=updated * masters + _state_bytes(case, stage, updated),
        held_parameters=held,
        optimizer_parameters=updated,
        frozen=frozen,
    )


def _state_bytes(case: Case, stage: Stage, updated: int) -> int:
    """Bytes that the optimizer keeps of `updated` parameters.

    AdamW two moments in fp32, or in the dtype of parameters that have no masters. AdamW of 8 bits a
    byte for each, and an fp32 scale for each 256 elements (torchao torchao/optim/subclass_8bit.py;
    tensors below 4096 elements, which it keeps in fp32, are assumed away). Muon one momentum of the
    blocks' matrices, AdamW's two of the rest.
    """
    training, layout = case.training, case.layout
    match training.optimizer:
        case "adamw":
            of = formats(training=training, layout=layout)
            traits = training.traits
            moment = of.computed if training.half_states or traits.half_moments else FP32_BYTES
            return updated * ADAM_STATES * moment
        case "adamw_8bit":
            scales = -(-updated // BLOCK_OF_8BIT_ELEMENTS)
            return ADAM_STATES * (updated + FP32_BYTES * scales)
        case "muon":
            matrices = muon_elements(case, stage, is_whole=layout.sharding == "ddp")
            return FP32_BYTES * (ADAM_STATES * updated - matrices)


def _shard_elements(case: Case, stage: Stage, whole: int) -> int:
    """Elements of the fullest shard: by tensors under FSDP2; ZeRO-1 and 2 cut a flat buffer.

    Expert-parallel ranks hold different experts, so fewer ranks share those.
    """
    layout = case.layout
    if layout.sharding == "ddp":
        return whole
    if layout.sharding == "fsdp" or layout.ep > 1:
        return stage_shard_elements(
            model=case.model,
            stage=stage,
            tp=layout.tp,
            shard_ranks=layout.shard_ranks,
            ep=layout.ep,
        )
    return -(-whole // layout.shard_ranks)


def sums_fp32_gradients(training: Training) -> bool:
    """Gradients are kept, or summed, in fp32.

    Where parameters are in half precision and gradients are not said to be, the buffer has the
    dtype of the reduction. Source: Megatron-LM megatron/core/distributed/
    distributed_data_parallel.py, `grad_reduce_in_fp32`.
    """
    traits = training.traits
    if training.half_states:  # what is reduced is cast to the dtype of the parameter
        return False
    if not traits.half_parameters:
        return True
    if not traits.half_gradients:
        return training.reduce_dtype == "fp32"
    return traits.fp32_gradients_of_bf16 and training.activation_dtype == "bf16"


def adds_in_fp32(*, training: Training, layout: Layout) -> bool:
    """The reference trainer's parameters in bf16 have fp32 sums of their gradients over the
    micro-batches of a step, unless FSDP holds them in the dtype of its single reduction.

    Source: fsdpplan.trainer.parallel.gradient_sums.
    """
    if training.stored_dtype != "bf16" or layout.num_microbatches == 1:
        return False
    return layout.sharding != "fsdp" or (layout.gradient_sync == "every" and layout.pp == 1)


def is_without_ddp(*, training: Training, layout: Layout) -> bool:
    """Whole parameters have no DDP around them, and no buckets: there is one replica, or a pipeline
    that averages gradients itself."""
    has_none = layout.data_parallel == 1 or layout.pp > 1
    return layout.sharding == "ddp" and has_none and not training.traits.wraps_alone


def makes_gradients(*, training: Training, layout: Layout) -> bool:
    """Without DDP's buckets, the first backward pass makes gradients, which are freed after the
    step."""
    is_first = layout.num_microbatches == 1 and layout.pp == 1
    return is_first and is_without_ddp(training=training, layout=layout)


def _resident_gradient_bytes(case: Case, stage: Stage, *, whole: int, shard: int) -> int:
    """Gradients of all the rank's parameters, or with ZeRO-2 of its shard; with fp32 sums, what
    half precision keeps beside them; and buckets that are not the gradients themselves."""
    training, layout = case.training, case.layout
    if layout.sharding == "fsdp" or makes_gradients(training=training, layout=layout):
        return 0
    traits = training.traits
    of = formats(training=training, layout=layout)
    sums = FP32_BYTES if sums_fp32_gradients(training) else of.computed
    total = (shard if layout.sharding == "zero2" else whole) * sums
    is_beside = sums == FP32_BYTES and traits.half_gradients_beside_fp32 == "resident"
    if is_beside and traits.half_parameters:
        total += whole * of.computed
    if training.powersgd_rank and layout.data_parallel > 1:
        total += _low_rank_bytes(case, stage, whole=whole)
    if traits.gradient_buckets and layout.data_parallel * layout.cp > 1:
        total += whole * of.resident
    return total


def _low_rank_bytes(case: Case, stage: Stage, *, whole: int) -> int:
    """What PowerSGD keeps: the error of each gradient, and the P and Q of each matrix that it
    compresses."""
    sent = low_rank(stage_shapes(case.model, stage), case.training.powersgd_rank)
    return FP32_BYTES * (whole + sent.p + sent.q)


DDP_BROADCAST_BYTES = 250 * 2**20
"""Parameters that DDP flattens together to broadcast them at its start."""


def initialization_peak_bytes(case: Case, stage: Stage) -> int:
    """Allocated at the highest point before the first step."""
    training, layout = case.training, case.layout
    state = rank_state(case, stage)
    if training.traits.half_parameters:
        return state.parameters + state.gradients + FP32_BYTES * state.optimizer_parameters
    whole = largest_tensor_bytes(model=case.model, stage=stage, tp=layout.tp, ep=layout.ep)
    if layout.sharding == "fsdp":
        if training.traits.flat_parameters:
            whole = 2 * largest_unit_bytes(case, stage)
        return whole if layout.offload == "cpu" else state.parameters + whole
    if not is_without_ddp(training=training, layout=layout):
        whole = max(whole, state.gradients + min(DDP_BROADCAST_BYTES, state.parameters))
    return state.parameters + whole


def checkpoint_peak_bytes(case: Case, stage: Stage) -> int:
    """Allocated at the highest point of a sharded checkpoint between two steps."""
    training, layout = case.training, case.layout
    state = rank_state(case, stage)
    kept = 0 if layout.offload == "cpu" else state.parameters + state.optimizer
    gradients = 0 if is_without_ddp(training=training, layout=layout) else state.gradients
    gathered = 0
    if layout.sharding == "fsdp" and training.traits.flat_parameters:
        gathered = largest_unit_bytes(case, stage)
    return kept + gradients + gathered


@lru_cache(maxsize=1024)
def largest_tensor_bytes(*, model: Model, stage: Stage, tp: int, ep: int) -> int:
    """fp32 bytes of the largest parameter of a rank before FSDP shards it."""
    tensors = [t for kind, _ in block_kinds(model=model, stage=stage) for t in block_tensors(kind)]
    tensors += embedding_tensors(model) if stage.has_embedding else ()
    tensors += head_tensors(model) if stage.has_head else ()
    alone = (prod(tensor.local_shape(tp, ep)) for tensor in tensors)
    return FP32_BYTES * max(alone, default=0)


def largest_unit_bytes(case: Case, stage: Stage) -> int:
    """fp32 bytes of the largest FSDP unit of a rank, whole."""
    model, layout = case.model, case.layout
    root = root_size(
        model=model,
        tp=layout.tp,
        shard_ranks=1,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    ).elements
    blocks = (
        min(layout.wrap_blocks, number)
        * unit_size(block_tensors(kind), tp=layout.tp, shard_ranks=1, ep=layout.ep).elements
        for kind, number in block_kinds(model=model, stage=stage)
    )
    return FP32_BYTES * max(root, *blocks, 0)


def holds_gradients(layout: Layout) -> bool:
    """Gradients stay unsharded from micro-batch to micro-batch until the last one reduces them; in
    a pipeline also those of a single one, until the schedule is through."""
    return layout.gradient_sync == "last" and (layout.num_microbatches > 1 or layout.pp > 1)


def weight_gradients_of(*, training: Training, layout: Layout) -> WeightGradientsOf:
    """What becomes of a weight's gradient when backward has made it.

    FSDP2 adds it at once where it holds gradients of the same dtype from earlier micro-batches.
    """
    of = formats(training=training, layout=layout)
    if layout.sharding != "fsdp":
        adds = not grows_in_backward(training=training, layout=layout)
    else:
        in_place = of.reduced == of.gathered or sums_in_reduce_dtype(training)
        adds = holds_gradients(layout) and in_place
    if of.autocasts:
        return "cast_and_added" if adds else "cast"
    return "added" if adds else "kept"


def grows_in_backward(*, training: Training, layout: Layout) -> bool:
    """Gradients gather until backward has ended: those in the compute dtype beside their fp32 sums,
    or all where they are not there before."""
    traits = training.traits
    return makes_gradients(training=training, layout=layout) or (
        layout.sharding != "fsdp"
        and traits.half_parameters
        and traits.half_gradients_beside_fp32 == "backward"
    )


def keeps_head_gradient(case: Case, stage: Stage) -> bool:
    """The head's gradient stays until its unit's reduction, or, of a tied table, until the
    embedding's joins it."""
    if not trains_ends(case.model):
        return False
    if shares_table(model=case.model, stage=stage):
        return True
    return weight_gradients_of(training=case.training, layout=case.layout) in ("kept", "cast")


def whole_table_gradient_bytes(case: Case, stage: Stage) -> int:
    """What a pipeline of whole copies holds of it beside its own rows: no FSDP ever splits it, and
    the sum over tensor-parallel ranks waits for the last micro-batch."""
    layout = case.layout
    if layout.sharding != "ddp" or layout.pp == 1 or case.training.traits.half_parameters:
        return 0
    of = formats(training=case.training, layout=layout)
    adds = adds_in_fp32(training=case.training, layout=layout)
    return (FP32_BYTES if adds else of.kept_gradient) * unsplit_table_elements(case, stage)


def unsplit_table_elements(case: Case, stage: Stage) -> int:
    """Elements of other ranks' rows in gradients that are kept from earlier micro-batches: the
    token table's is made whole, and split over tensor-parallel ranks when it is reduced, or when
    the gradient of a tied head, which is split, is added to it."""
    model = case.model
    is_whole = stage.has_embedding and not shares_table(model=model, stage=stage)
    is_whole &= trains_ends(model)
    rows, tp = model.vocab_rows(case.layout.tp), case.layout.tp
    unsplit_rows = rows - rows // tp if is_whole else 0
    return unsplit_rows * model.hidden


def embedding_gradient_bytes(case: Case, stage: Stage) -> int:
    """DTensor makes the token table's gradient whole on each rank and copies its rows out, in a
    pipeline when it is reduced; other softwares look up, and make gradients of, their own rows
    alone. With a tied head, autograd adds
    the head's gradient to the token table's out of place."""
    model, training, layout = case.model, case.training, case.layout
    if not stage.has_embedding or not trains_ends(model):
        return 0
    of = formats(training=training, layout=layout)
    adds_up = layout.pp == 1 and holds_gradients(layout) and sums_in_reduce_dtype(training)
    element_bytes = of.reduced if adds_up and layout.sharding == "fsdp" else of.gathered
    local_vocab = model.vocab_rows(layout.tp) // layout.tp
    rows = local_vocab
    if layout.tp > 1 and not training.traits.half_parameters:
        rows = local_vocab * layout.tp + (rows if layout.pp == 1 else 0)
    if shares_table(model=model, stage=stage):
        rows += local_vocab
    if model.positions == "learned":
        rows += model.max_positions
    return rows * model.hidden * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGradientBytes:
    """Bytes of one element of a gradient shard in the last micro-batch of a step."""

    earlier: int
    """Before this micro-batch reduces it."""
    later: int
    """After it, with what HSDP keeps of its all-reduce."""
    reduced: int
    """Of one element of a gradient shard while it is reduced: the output, and its copy in the dtype
    of the parameters."""


def shard_gradient_bytes(*, training: Training, layout: Layout) -> ShardGradientBytes:
    """HSDP refers to each all-reduced buffer until the unit's next reduction or the end of the last
    backward; in fp32 the first micro-batch's buffers are the gradients.

    Where micro-batches add up in fp32, the sums are in the place of the gradients until the last
    one has reduced them.

    With offload they go to the host, but for those two.

    Source: torch 2.13 `FSDPParamGroup._all_reduce_state` and `_partial_reduce_output`.
    """
    if layout.sharding != "fsdp":  # they stay, as part of the ledger
        return ShardGradientBytes(earlier=0, later=0, reduced=0)
    of = formats(training=training, layout=layout)
    kept = FP32_BYTES if sums_fp32_gradients(training) else of.computed
    is_hsdp = layout.dp_replicate > 1
    copy = kept if of.reduced != kept else 0
    output = of.reduced + copy
    if layout.offload == "cpu":
        kept = of.reduced if is_hsdp else 0
        has_earlier = layout.num_microbatches > 1 and not holds_gradients(layout)
        return ShardGradientBytes(earlier=kept if has_earlier else 0, later=kept, reduced=output)
    if adds_in_fp32(training=training, layout=layout):
        buffer = of.reduced if is_hsdp else 0
        earlier = later = FP32_BYTES + buffer
        if layout.num_microbatches == 2:  # none between, which leaves all sums
            later = kept + (buffer if copy else 0)
        return ShardGradientBytes(earlier=earlier, later=later, reduced=output - buffer)
    first_input = of.reduced if is_hsdp and copy else 0
    if layout.num_microbatches == 1 or holds_gradients(layout):
        return ShardGradientBytes(earlier=0, later=kept + first_input, reduced=output)
    if not is_hsdp:
        return ShardGradientBytes(earlier=kept, later=kept, reduced=output)
    if layout.gradient_sync == "reduce_scatter_only":
        return ShardGradientBytes(earlier=of.reduced, later=kept + first_input, reduced=output)
    later = kept + of.reduced
    earlier = kept + first_input if layout.num_microbatches == 2 else later
    return ShardGradientBytes(earlier=earlier, later=later, reduced=output - (earlier - kept))
