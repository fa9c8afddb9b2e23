"""Sizes: the quantities that the memory phases of one rank add up.

Number formats, what the layout's policies keep from one micro-batch to the next, and what tensor
parallelism splits or does not split.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.activations import (
    FP32_BYTES,
    BlockActivations,
    WeightGradientsOf,
    block_activations,
    weight_gradient_bytes,
)
from fsdpplan.cost.phases import RankSizes
from fsdpplan.cost.shards import Stage, block_size, root_size
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES, Training


def local_tokens(*, training: Training, layout: Layout) -> int:
    """Tokens of one micro-batch on one rank, before sequence parallelism splits them."""
    return layout.micro_batch * -(-training.seq_len // layout.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bytes of one element of each kind of tensor."""

    computed: int
    """Matmuls' inputs, outputs and weights."""
    gathered: int
    """Unsharded parameters and their gradients."""
    residual: int
    """The residual stream."""
    reduced: int
    """Gradients in the collectives."""

    @property
    def autocasts(self) -> bool:
        """Weights and inputs are cast for each matmul."""
        return self.computed < self.gathered


def formats(*, training: Training, layout: Layout) -> Formats:
    """Number formats of a training: DDP has fp32 parameters and autocast; FSDP2 gathers in the
    compute dtype. The reference decoder keeps its residual stream in the compute dtype under
    autocast too; a script of the runtime `autocast` has it in fp32, as plain autocast leaves it."""
    computed = DTYPE_BYTES[training.precision]
    is_fsdp = layout.sharding == "fsdp"
    gathered = DTYPE_BYTES[training.gathered_dtype] if is_fsdp else FP32_BYTES
    return Formats(
        computed=computed,
        gathered=gathered,
        residual=gathered if training.runtime == "autocast" else computed,
        reduced=DTYPE_BYTES[training.reduce_dtype],
    )


def rank_sizes(
    *, model: Model, training: Training, layout: Layout, stage: Stage, in_flight_blocks: int
) -> RankSizes:
    """Sizes that the phases of one pipeline rank add up.

    `in_flight_blocks` counts (micro-batch, block) pairs whose activations are alive at the
    schedule's worst moment; without pipelining it is the number of blocks.
    """
    of = formats(training=training, layout=layout)
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
    block = _block_activations(model=model, training=training, layout=layout)
    holds = _holds_gradients(layout)
    shard_gradient = _shard_gradient_bytes(layout=layout, reduce_bytes=of.reduced)
    tokens = local_tokens(training=training, layout=layout)
    residual_tokens = -(-tokens // layout.tp) if layout.sequence_parallel else tokens
    head = int(stage.has_head)
    head_elements = head * -(-model.vocab // layout.tp) * model.hidden
    vocab = -(-model.vocab // layout.tp) if layout.loss_parallel else model.vocab
    last_residual = head * residual_tokens * model.hidden * of.residual
    last_normed = head * tokens * model.hidden * of.computed
    # GPipe's last stage goes forward with every micro-batch before it goes back with the first
    others_at_the_loss = layout.num_microbatches - 1 if layout.schedule == "gpipe" else 0
    head_activations = (
        last_residual + last_normed + head * tokens * vocab * (FP32_BYTES + of.computed)
    )
    has_buffers = is_fsdp and shard_ranks > 1 and not of.autocasts
    rank_elements = stage.blocks * block_unit.elements + root_unit.elements
    gathered_block = block_unit.padded_elements * of.gathered
    gathered_root = root_unit.padded_elements * of.gathered
    reduce_root = root_unit.padded_elements * of.reduced
    return RankSizes(
        blocks=stage.blocks,
        unit_blocks=min(layout.wrap_blocks, stage.blocks),
        gathered_block=gathered_block,
        buffer_block=gathered_block if has_buffers else 0,
        prefetched_block=gathered_block if shard_ranks > 1 else 0,
        copies_block=weight_gradient_bytes(
            model=model, tp=layout.tp, element_bytes=of.computed
        ).total
        if of.autocasts
        else 0,
        copies_root=head_elements * of.computed if of.autocasts else 0,
        kept_block=_kept_block_bytes(layout=layout, gathered_block=gathered_block),
        regathers=layout.reshard_after_forward != "never",
        block_gradient=0 if holds else block_unit.elements * of.gathered,
        reduce_block=block_unit.padded_elements * of.reduced,
        held_block=block_unit.elements * of.reduced if holds else 0,
        gathered_root=gathered_root,
        buffer_root=gathered_root if has_buffers else 0,
        root_gradient=0 if holds else root_unit.elements * of.gathered,
        reduce_root=reduce_root,
        held_root=_held_root_elements(root_unit.elements, model=model, layout=layout, stage=stage)
        * of.reduced,
        behind_root=reduce_root if layout.num_microbatches > 1 and not holds else 0,
        head_gradient=head_elements * of.gathered
        if _keeps_head_gradient(model=model, training=training, layout=layout, stage=stage)
        else 0,
        head_gradient_made=head_elements * of.computed,
        embedding_gradient=_embedding_gradient_bytes(
            model=model, layout=layout, stage=stage, element_bytes=of.gathered
        ),
        bucket_copy=0
        if is_fsdp or of.reduced == FP32_BYTES
        else min(layout.ddp_bucket_bytes // FP32_BYTES, rank_elements) * of.reduced,
        shard_block_elements=block_unit.shard_elements(shard_ranks),
        shard_root_elements=root_unit.shard_elements(shard_ranks),
        earlier_gradient_bytes=shard_gradient.earlier,
        later_gradient_bytes=shard_gradient.later,
        reduced_bytes=shard_gradient.reduced,
        block=block,
        other_micro_batches=(in_flight_blocks - stage.blocks) * block.saved_bytes
        + others_at_the_loss * head_activations,
        is_steady=in_flight_blocks < layout.num_microbatches * stage.blocks,
        message_buffers=_message_buffers_bytes(
            layout=layout,
            stage=stage,
            message_bytes=residual_tokens * model.hidden * of.residual,
        ),
        last_residual=last_residual,
        last_normed=last_normed,
        logits_elements=head * tokens * vocab,
        logits_gather_bytes=head
        * _logits_gather_bytes(model=model, training=training, layout=layout),
        loss_element_bytes=_loss_element_bytes(layout),
        element_bytes=of.computed,
    )


def _block_activations(*, model: Model, training: Training, layout: Layout) -> BlockActivations:
    """Activation quantities of one block for one micro-batch."""
    of = formats(training=training, layout=layout)
    return block_activations(
        model=model,
        tokens=local_tokens(training=training, layout=layout),
        seq_len=-(-training.seq_len // layout.cp),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        element_bytes=of.computed,
        residual_element_bytes=of.residual,
        mode=layout.activation_checkpointing,
        weight_gradients=_weight_gradients_of(training=training, layout=layout),
    )


def _weight_gradients_of(*, training: Training, layout: Layout) -> WeightGradientsOf:
    """What becomes of a weight's gradient when backward has made it.

    FSDP2 adds it at once where it holds gradients of the same dtype from earlier micro-batches.
    """
    of = formats(training=training, layout=layout)
    adds = layout.sharding != "fsdp" or (_holds_gradients(layout) and of.reduced == of.gathered)
    if of.autocasts:
        return "cast_and_added" if adds else "cast"
    return "added" if adds else "kept"


def _keeps_head_gradient(*, model: Model, training: Training, layout: Layout, stage: Stage) -> bool:
    """The head's gradient stays to the end of backward: until the root's reduction, or, of a tied
    table, until the embedding's joins it."""
    if model.tied_embeddings and stage.has_embedding:
        return True
    return _weight_gradients_of(training=training, layout=layout) in ("kept", "cast")


def _held_root_elements(elements: int, *, model: Model, layout: Layout, stage: Stage) -> int:
    """Elements of the root's gradients kept from earlier micro-batches. The token table's gradient
    is made whole, and split over tensor-parallel ranks when it is reduced."""
    if not _holds_gradients(layout):
        return 0
    unsplit_rows = model.vocab - -(-model.vocab // layout.tp) if stage.has_embedding else 0
    return elements + unsplit_rows * model.hidden


def _holds_gradients(layout: Layout) -> bool:
    """Gradients stay unsharded from micro-batch to micro-batch until the last one reduces them."""
    return layout.num_microbatches > 1 and layout.gradient_sync == "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGradientBytes:
    """Bytes of one element of a gradient shard in the last micro-batch of a step."""

    earlier: int
    """Before this micro-batch reduces it."""
    later: int
    """After that."""
    reduced: int
    """More than `earlier` while it is being reduced."""


def _shard_gradient_bytes(*, layout: Layout, reduce_bytes: int) -> ShardGradientBytes:
    """DDP's are its buckets. HSDP refers to each all-reduced buffer until the unit's next reduction
    or the end of the last backward; in fp32 the first micro-batch's buffers are the gradients.

    Source: torch 2.13 `FSDPParamGroup._all_reduce_state` and `_partial_reduce_output`.
    """
    if layout.sharding != "fsdp":
        return ShardGradientBytes(earlier=FP32_BYTES, later=FP32_BYTES, reduced=0)
    is_hsdp = layout.dp_replicate > 1
    copy = FP32_BYTES if reduce_bytes < FP32_BYTES else 0
    output = reduce_bytes + copy
    first_input = reduce_bytes if is_hsdp and copy else 0
    if layout.num_microbatches == 1 or _holds_gradients(layout):
        return ShardGradientBytes(earlier=0, later=FP32_BYTES + first_input, reduced=output)
    if not is_hsdp:
        return ShardGradientBytes(earlier=FP32_BYTES, later=FP32_BYTES, reduced=output)
    if layout.gradient_sync == "reduce_scatter_only":
        return ShardGradientBytes(
            earlier=reduce_bytes, later=FP32_BYTES + first_input, reduced=output
        )
    later = FP32_BYTES + reduce_bytes
    earlier = FP32_BYTES + first_input if layout.num_microbatches == 2 else later
    return ShardGradientBytes(earlier=earlier, later=later, reduced=output - (earlier - FP32_BYTES))


def _message_buffers_bytes(*, layout: Layout, stage: Stage, message_bytes: int) -> int:
    """A buffer for each message that a pipeline rank receives in a step: inputs and gradients."""
    if layout.pp == 1:
        return 0
    ends = int(stage.has_embedding) + int(stage.has_head)
    return layout.num_microbatches * (2 * layout.virtual_stages - ends) * message_bytes


def _logits_gather_bytes(*, model: Model, training: Training, layout: Layout) -> int:
    """Without a vocabulary-parallel loss, ranks gather the logits, then join them side by side."""
    if layout.tp == 1 or layout.loss_parallel:
        return 0
    local_vocab = -(-model.vocab // layout.tp)
    tokens = local_tokens(training=training, layout=layout)
    return tokens * (model.vocab + local_vocab) * DTYPE_BYTES[training.precision]


def _loss_element_bytes(layout: Layout) -> int:
    """fp32 tensors that cross-entropy holds at its highest, in backward.

    Log-probabilities and two gradients; torch's `loss_parallel` makes one gradient more. Forward
    holds less: the logits, their fp32 copy and the log-probabilities.
    """
    return FP32_BYTES * (4 if layout.tp > 1 and layout.loss_parallel else 3)


def _embedding_gradient_bytes(
    *, model: Model, layout: Layout, stage: Stage, element_bytes: int
) -> int:
    """The tables' gradients are made whole on each rank; tensor parallelism copies its rows out;
    with a tied head, autograd adds the head's to the token table's out of place."""
    if not stage.has_embedding:
        return 0
    local_vocab = -(-model.vocab // layout.tp)
    rows = model.vocab + (local_vocab if layout.tp > 1 else 0)
    if model.tied_embeddings and stage.has_head:
        rows += local_vocab
    if model.positions == "learned":
        rows += model.max_positions
    return rows * model.hidden * element_bytes


def _kept_block_bytes(*, layout: Layout, gathered_block: int) -> int:
    """What stays of a block's gathered parameters between its forward and its backward."""
    match layout.reshard_after_forward:
        case "never":
            return gathered_block
        case "always":
            return 0
        case ranks:
            # to as many ranks as share it: FSDP2 then frees it as under always
            return 0 if ranks == layout.shard_ranks else gathered_block // ranks
