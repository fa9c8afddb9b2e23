"""Sizes: the quantities that the memory phases of one rank add up.

Number formats are in `formats`, what the layout's policies keep of gradients in `gradient_sizes`,
the logits in `head_sizes`; here they meet the sizes of blocks and of FSDP's units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdpplan.cost.block.branch import weight_gradient_bytes
from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.kernels.head import head_sizes
from fsdpplan.cost.memory.activations import (
    BESIDE_SAVED,
    BlockActivations,
    ExpertsUnit,
    mean_activations,
    mean_saved_bytes,
)
from fsdpplan.cost.memory.ledger import (
    adds_in_fp32,
    embedding_gradient_bytes,
    grows_in_backward,
    holds_gradients,
    is_without_ddp,
    keeps_head_gradient,
    rank_state,
    shard_gradient_bytes,
    unsplit_table_elements,
    weight_gradients_of,
    whole_table_gradient_bytes,
)
from fsdpplan.cost.memory.rank_quantities import (
    Ends,
    EndSizes,
    RankSizes,
    UnitRun,
    UnitSizes,
)
from fsdpplan.cost.memory.weight_gradients import (
    split_backward,
    split_backward_bytes,
)
from fsdpplan.cost.model.attention_kernel import masked_share
from fsdpplan.cost.model.formats import (
    FP32_BYTES,
    formats,
    has_lean_pipelines,
    has_lean_units,
    keeps_reduction_behind,
    local_tokens,
    sums_in_reduce_dtype,
)
from fsdpplan.cost.model.params import kind_views, trains_ends
from fsdpplan.cost.model.shards import (
    NOTHING,
    EndUnits,
    Stage,
    UnitSize,
    block_cases,
    block_kinds,
    block_size,
    end_units,
    expert_size,
    keeping,
    shares_table,
    stage_root_size,
    sum_of_sizes,
    unit_blocks_in_order,
)
from fsdpplan.cost.schedule.stages import stage_moments
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training


def rank_sizes(case: Case, stage: Stage, *, in_flight_blocks: int) -> RankSizes:
    """Sizes that the phases of one pipeline rank add up.

    `in_flight_blocks` counts (micro-batch, block) pairs whose activations are alive at the
    schedule's worst moment; without pipelining it is the number of blocks. FSDP's units are as they
    are; in a pipeline all blocks are gathered and computed as those of the largest kind.
    """
    model, training, layout = case.model, case.training, case.layout
    of = formats(training=training, layout=layout)
    is_fsdp = layout.sharding == "fsdp"
    shard_ranks = layout.shard_ranks if is_fsdp else 1
    has_buffers = is_fsdp and shard_ranks > 1 and not training.traits.flat_parameters
    block_model = _largest_kind(case, stage, shard_ranks=shard_ranks)
    largest, shard_block = _block_unit(block_model, layout=layout, shard_ranks=shard_ranks)
    ways = {"tp": layout.tp, "shard_ranks": shard_ranks}
    root = stage_root_size(model=model, stage=stage, **ways)
    ends = _ends(case, stage, shard_ranks=shard_ranks, has_buffers=has_buffers)
    state = rank_state(case, stage)
    block, kept = _own_activations(case, stage)
    head = head_sizes(case, stage)
    holds = holds_gradients(layout)
    shard_gradient = shard_gradient_bytes(training=training, layout=layout)
    # their last stage goes forward with every micro-batch before it goes back with the first
    forward_first = layout.schedule in ("gpipe", "looped_bfs")
    others_at_the_loss = layout.num_microbatches - 1 if forward_first else 0
    apart = _experts_apart(block_model, layout=layout, shard_ranks=shard_ranks)
    mean = _mean_block_unit(case, stage, shard_ranks=shard_ranks)
    gathered_block_bytes = mean.gathered_bytes(of.gathered_matrix)
    has_units = is_fsdp and layout.pp == 1
    unit_kinds, unit_order = _units(case, stage, has_buffers=has_buffers) if has_units else ((), ())
    copies = weight_gradient_bytes(
        model=block_model, tp=layout.tp, element_bytes=of.computed, ep=layout.ep
    )
    in_flight = -(-in_flight_blocks // max(1, stage.blocks))
    hidden_tokens = local_tokens(training=training, layout=layout) * model.hidden
    is_cast = head.pieces is not None and layout.pp == 1 and sums_in_reduce_dtype(training)
    of_head = of.reduced if is_cast else of.gathered
    grows = grows_in_backward(training=training, layout=layout)
    of_grown = of.computed if training.traits.half_parameters else of.kept_gradient
    mask_bytes = _embedding_mask_bytes(case) if stage.has_embedding else 0
    beside_blocks_bytes = others_at_the_loss * head.kept_bytes + in_flight * mask_bytes
    copies_block_bytes = sum(copies.values()) if of.autocasts else 0
    of_trained_head = head.weight_elements if trains_ends(model) else 0
    copies_root_bytes = of_trained_head * of.computed if of.autocasts else 0
    moments = stage_moments(case, stage, in_flight_blocks=in_flight_blocks)
    remade = block.live_bytes - block.saved_bytes
    if layout.activation_checkpointing != "full":  # attention alone is made again in each half
        remade = 0
    copied_bytes = _copied_bytes(training=training, layout=layout)
    casts_bucket = _casts_buckets(training=training, layout=layout)
    return RankSizes(
        blocks=stage.blocks,
        unit_blocks=max(1, min(layout.wrap_blocks, stage.blocks)),
        # one rank has no gradient in a loop that splits them
        has_lean_units=has_lean_units(training) or shard_ranks == 1,
        keeps_reduction_behind=keeps_reduction_behind(training),
        gathers_in_place=is_fsdp and training.traits.flat_parameters,
        unit_kinds=unit_kinds,
        unit_order=unit_order,
        gathered_block_bytes=gathered_block_bytes,
        copies_block_bytes=copies_block_bytes,
        copies_root_bytes=copies_root_bytes,
        caches_copies=training.traits.caches_casts,
        regathers=layout.reshard_after_forward != "never",
        reduce_block_bytes=(largest.padded_elements - apart.padded_elements) * of.reduced,
        reduce_experts_bytes=apart.padded_elements * of.reduced,
        held_block_bytes=mean.elements * of.reduced if holds else 0,
        ends=ends,
        behind_ends_bytes=ends.last.reduce_bytes
        if layout.num_microbatches > 1 and not holds
        else 0,
        head_gradient_bytes=head.weight_elements * of_head
        if keeps_head_gradient(case, stage)
        else 0,
        head_gradient_made_bytes=of_trained_head * of.computed,
        embedding_gradient_bytes=embedding_gradient_bytes(case, stage),
        bucket_copy_bytes=_bucket_copy_bytes(
            training=training, layout=layout, elements=state.held_parameters
        ),
        head_copy_bytes=0
        if shares_table(model=model, stage=stage)
        else copied_bytes * of_trained_head,
        table_copy_bytes=_table_copy_bytes(
            case, stage, copied_bytes=copied_bytes, elements=state.held_parameters
        ),
        sent_copies_bytes=of.reduced * state.held_parameters
        if casts_bucket and layout.pp > 1
        else 0,
        shard_block_elements=(state.held_parameters - ends.shard_elements) // max(1, stage.blocks)
        if is_fsdp
        else shard_block,
        earlier_gradient_bytes=shard_gradient.earlier,
        later_gradient_bytes=shard_gradient.later,
        reduced_bytes=shard_gradient.reduced,
        resident_gradient_bytes=state.gradients
        + _accumulated_bytes(training=training, layout=layout, elements=state.held_parameters),
        whole_table_gradient_bytes=whole_table_gradient_bytes(case, stage),
        grown_block_bytes=block.weight_gradient_bytes // of.computed * of_grown if grows else 0,
        grown_root_bytes=root.elements * of_grown if grows else 0,
        block=block,
        kept=kept,
        kept_blocks=stage.kept_blocks,
        other_micro_batches_bytes=_others_saved_bytes(
            stage, in_flight_blocks, block, kept, copies_bytes=copies_block_bytes
        )
        + others_at_the_loss * copies_root_bytes
        + beside_blocks_bytes
        + split_backward_bytes(case, stage, remade_bytes=remade),
        beside_blocks_bytes=beside_blocks_bytes,
        split=split_backward(case, stage, remade_bytes=remade),
        pipeline_ends=stage.has_embedding + stage.has_head,
        moments=moments,
        keeps_stages=training.traits.keeps_stages,
        graded_blocks=_graded_blocks(stage, training=training),
        frees_messages=training.traits.frees_messages,
        reduces_tables_last=has_lean_pipelines(training),
        message_buffers_bytes=message_buffer_bytes(
            case, stage, in_flight=in_flight, message_bytes=block.residual_bytes
        ),
        recorded_bytes=2 * hidden_tokens * of.computed
        if layout.sequence_parallel and not layout.async_tp
        else 0,
        last_residual_bytes=head.last_residual_bytes,
        last_normed_bytes=head.last_normed_bytes,
        unkept_normed_bytes=head.unkept_normed_bytes,
        logits_elements=head.logits_elements,
        logits_gather_bytes=head.gather_bytes,
        loss_element_bytes=head.loss_element_bytes,
        loss_gradient_element_bytes=head.loss_gradient_element_bytes,
        element_bytes=of.computed,
        pieces=head.pieces,
    )


def _ends(case: Case, stage: Stage, *, shard_ranks: int, has_buffers: bool) -> Ends:
    """Units of embedding, final norm and head; without FSDP they are the root, whole. On the rank
    of a V, which has both in two stages, an end of which each has one is reduced one at a time."""
    training, layout = case.training, case.layout
    of = formats(training=training, layout=layout)
    holds = holds_gradients(layout)
    unsplit = unsplit_table_elements(case, stage)
    of_head = head_sizes(case, stage).weight_elements
    pieces = [
        end_units(case, piece)
        if layout.sharding == "fsdp"
        else EndUnits(
            root=stage_root_size(
                model=case.model, stage=piece, tp=layout.tp, shard_ranks=shard_ranks
            )
        )
        for piece in stage.pieces
    ]

    def sizes(units: list[UnitSize], *, unsplit: int, last: int) -> EndSizes:
        elements = sum(unit.elements for unit in units)
        gathered = sum(unit.gathered_bytes(of.gathered) for unit in units)
        return EndSizes(
            gathered_bytes=gathered,
            buffer_bytes=gathered if has_buffers else 0,
            gradient_bytes=0 if holds else elements * of.gathered,
            last_gradient_bytes=last * (of.reduced if holds else of.gathered) if elements else 0,
            reduce_bytes=of.reduced * max(unit.padded_elements for unit in units),
            held_bytes=(elements + unsplit) * of.reduced if holds else 0,
            shard_elements=sum(unit.shard_elements(shard_ranks) for unit in units),
        )

    tables = [each.tables for each in pieces]
    is_apart = any(each != NOTHING for each in tables)
    return Ends(
        tables=sizes(
            tables,
            unsplit=unsplit if is_apart else 0,
            last=_last_table_elements(case.model, tp=layout.tp),
        ),
        head=sizes([each.head for each in pieces], unsplit=0, last=of_head),
        root=sizes(
            [each.root for each in pieces], unsplit=0 if is_apart else unsplit, last=of_head
        ),
    )


def _last_table_elements(model: Model, *, tp: int) -> int:
    """Of the embedding's table that is registered last."""
    rows = model.max_positions if model.positions == "learned" else -(-model.vocab // tp)
    return rows * model.hidden


def _block_unit(model: Model, *, layout: Layout, shard_ranks: int) -> tuple[UnitSize, int]:
    """A block with its routed experts, which expert parallelism makes a unit of their own; and the
    elements of its shard."""
    ep = layout.ep
    # not sharded by FSDP, the experts of one rank are one shard
    expert_ranks = ep if shard_ranks % ep else shard_ranks
    block = block_size(model=model, tp=layout.tp, shard_ranks=shard_ranks, ep=ep)
    experts = expert_size(model=model, tp=layout.tp, shard_ranks=expert_ranks, ep=ep)
    both = sum_of_sizes(((block, 1), (experts, 1)))
    shard = block.shard_elements(shard_ranks) + experts.shard_elements(expert_ranks // ep)
    return both, shard


def _graded_blocks(stage: Stage, *, training: Training) -> int:
    """All of a rank where the last micro-batch reduces them. Reduced after each round, those of the
    stage at work and of the one that is reduced beside it."""
    if not training.traits.reduces_rounds:
        return stage.blocks
    return min(stage.blocks, 2 * max(piece.blocks for piece in stage.pieces))


def _experts_apart(model: Model, *, layout: Layout, shard_ranks: int) -> UnitSize:
    """The routed experts that FSDP gathers and reduces as a unit of their own, within a block's."""
    is_apart = layout.sharding == "fsdp" and layout.ep > 1 and shard_ranks % layout.ep == 0
    return expert_size(
        model=model, tp=layout.tp, shard_ranks=shard_ranks, ep=layout.ep if is_apart else 1
    )


def _largest_kind(case: Case, stage: Stage, *, shard_ranks: int) -> Model:
    """The kind of block that is largest on a rank, which with expert parallelism may be one without
    experts."""
    kinds = [kind for kind, _ in block_kinds(model=case.model, stage=stage)]

    def elements(kind: Model) -> int:
        unit, _ = _block_unit(kind, layout=case.layout, shard_ranks=shard_ranks)
        return unit.gathered_bytes(FP32_BYTES)

    return max(reversed(kinds), key=elements, default=kind_views(case.model)[-1])


def _units(
    case: Case, stage: Stage, *, has_buffers: bool
) -> tuple[tuple[UnitSizes, ...], tuple[int, ...]]:
    """(FSDP units of the blocks of `stage`, each once; which of them each is)."""
    units, order = unit_blocks_in_order(case.model, stage, wrap_blocks=case.layout.wrap_blocks)
    return tuple(_unit_sizes(case, unit, has_buffers=has_buffers) for unit in units), order


def _unit_sizes(
    case: Case, unit: tuple[tuple[Model, bool, int], ...], *, has_buffers: bool
) -> UnitSizes:
    """Sizes of a unit of runs of (kind, whether such blocks keep everything, how many)."""
    training, layout = case.training, case.layout
    of, ranks = formats(training=training, layout=layout), layout.shard_ranks
    runs: list[UnitRun] = []
    sizes: list[tuple[UnitSize, int]] = []
    end = 0
    for kind, keeps, number in unit:
        size = block_size(model=kind, tp=layout.tp, shard_ranks=ranks, ep=layout.ep)
        sizes.append((size, number))
        end += number
        apart = _experts_apart(kind, layout=layout, shard_ranks=ranks)
        experts_bytes = apart.padded_elements * of.gathered_matrix
        is_shared = ranks > layout.ep
        of_kind = case.of_blocks(kind)
        runs.append(
            UnitRun(
                end=end,
                number=number,
                block=activations_of_block(
                    replace(of_kind, layout=keeping(layout)) if keeps else of_kind
                ),
                experts_bytes=experts_bytes,
                experts_prefetched_bytes=experts_bytes if is_shared else 0,
                experts_buffer_bytes=experts_bytes if has_buffers and is_shared else 0,
                experts_reduce_bytes=apart.padded_elements * of.reduced,
                experts_held_bytes=apart.elements * of.reduced if holds_gradients(layout) else 0,
                experts_shard_elements=apart.shard_elements(max(1, ranks // layout.ep)),
                experts_kept_bytes=_kept_bytes(layout, experts_bytes),
            )
        )
    whole = sum_of_sizes(sizes)
    elements, padded = whole.elements, whole.padded_elements
    gathered = whole.gathered_bytes(of.gathered_matrix)
    return UnitSizes(
        runs=tuple(runs),
        gathered_bytes=gathered,
        buffer_bytes=gathered if has_buffers else 0,
        prefetched_bytes=gathered if ranks > 1 else 0,
        gradient_bytes=0 if holds_gradients(layout) else elements * of.gathered,
        reduce_bytes=padded * of.reduced,
        held_bytes=elements * of.reduced if holds_gradients(layout) else 0,
        kept_bytes=_kept_bytes(layout, gathered),
        shard_elements=padded // ranks,
    )


def _mean_block_unit(case: Case, stage: Stage, *, shard_ranks: int) -> UnitSize:
    """A block of the stage in the mean over those with and without experts."""
    model = case.model
    kinds = block_kinds(model=model, stage=stage) or ((kind_views(model)[-1], 1),)
    units = [
        (_block_unit(kind, layout=case.layout, shard_ranks=shard_ranks)[0], number)
        for kind, number in kinds
    ]
    blocks, whole = max(1, stage.blocks), sum_of_sizes(units)
    return UnitSize(
        elements=whole.elements // blocks,
        padded_elements=whole.padded_elements // blocks,
        tensors=units[-1][0].tensors,
        frozen_bytes=whole.frozen_bytes // blocks,
        padded_frozen_bytes=whole.padded_frozen_bytes // blocks,
    )


def _own_activations(case: Case, stage: Stage) -> tuple[BlockActivations, BlockActivations]:
    """Activations of a block that recomputes as the layout says, and of one that keeps all."""
    found = block_cases(case, stage) or ((case.of_blocks(kind_views(case.model)[-1]), 1),)
    recomputing = [one for one in found if one[0].layout == case.layout]
    keeping = [one for one in found if one[0].layout != case.layout]
    block = _mean_activations(recomputing or keeping)
    return block, _mean_activations(keeping) if keeping else block


def _mean_activations(kinds: Sequence[tuple[Case, int]]) -> BlockActivations:
    """Activations of a block of the (case of the block, how many): what all keep in the mean,
    beside what the last kind needs, which has experts where some have; of a pattern's kinds beside
    the most that any needs."""
    made = [(activations_of_block(own), blocks) for own, blocks in kinds]
    last, _ = made[-1]
    blocks = sum(number for _, number in made)
    saved = sum(number * one.saved_bytes for one, number in made) // blocks
    if not any(own.model.is_patterned for own, _ in kinds):
        return replace(
            last, saved_bytes=saved, live_bytes=saved + last.live_bytes - last.saved_bytes
        )
    each = [one for one, _ in made]
    return replace(
        last,
        saved_bytes=saved,
        live_bytes=saved + max(one.live_bytes - one.saved_bytes for one in each),
        **{
            name: max(getattr(one, name) for one in each)
            for name in (*BESIDE_SAVED, "weight_gradient_bytes")
        },
    )


def _others_saved_bytes(
    stage: Stage,
    in_flight_blocks: int,
    block: BlockActivations,
    kept: BlockActivations,
    *,
    copies_bytes: int,
) -> int:
    """Activations of the micro-batches of a pipeline rank beside the one at work, and autocast's
    copies of a block's weights: each micro-batch makes its own, unless backward makes them anew.

    Those that keep everything are taken to be as large a part of them as of the rank's blocks,
    which is so where its stages are of one size.
    """
    others = max(0, in_flight_blocks - stage.blocks)
    all_kept = -(-others * stage.kept_blocks // max(1, stage.blocks))
    recomputes = block.live_bytes > block.saved_bytes
    copied = all_kept if recomputes else others
    saved = (others - all_kept) * block.saved_bytes + all_kept * kept.saved_bytes
    return saved + copied * copies_bytes


def _embedding_mask_bytes(case: Case) -> int:
    """What dropout behind the embedding keeps of a micro-batch: a byte an element."""
    training, layout = case.training, case.layout
    if not (training.traits.dropout or training.dropped.embedding):
        return 0
    tokens = local_tokens(training=training, layout=layout)
    splits = training.dropped.embedding and layout.sequence_parallel
    return (-(-tokens // layout.tp) if splits else tokens) * case.model.hidden


def activations_of_block(case: Case) -> BlockActivations:
    """Activation quantities of one block for one micro-batch."""
    training, layout = case.training, case.layout
    return mean_activations(
        block_work(case),
        masked=_masked_share(case),
        mode=layout.activation_checkpointing,
        weight_gradients=weight_gradients_of(training=training, layout=layout),
        experts=_experts_unit(case),
    )


def _experts_unit(case: Case) -> ExpertsUnit | None:
    """The routed experts of a block that are reduced in its backward pass: a pipeline reduces a
    stage after its last one."""
    layout = case.layout
    apart = _experts_apart(case.model, layout=layout, shard_ranks=layout.shard_ranks)
    if not apart.elements or layout.pp > 1:
        return None
    of = formats(training=case.training, layout=layout)
    shards = shard_gradient_bytes(training=case.training, layout=layout)
    elements = apart.shard_elements(max(1, layout.shard_ranks // layout.ep))
    return ExpertsUnit(
        reduce_bytes=apart.padded_elements * of.reduced,
        gradient_bytes=apart.elements * of.computed,
        output_bytes=elements * shards.reduced,
        shard_bytes=elements * max(0, shards.later - shards.earlier),
        held_bytes=apart.elements * of.reduced if holds_gradients(layout) else 0,
    )


def saved_bytes_a_block(case: Case) -> dict[ActivationCheckpointing, int]:
    """What one block keeps of a micro-batch for its backward pass, by what it recomputes."""
    return mean_saved_bytes(block_work(case), masked=_masked_share(case))


def _masked_share(case: Case) -> float:
    device = case.cluster.device
    return masked_share(model=case.model, training=case.training, device=device)


def _accumulated_bytes(*, training: Training, layout: Layout, elements: int) -> int:
    """Gradients of DDP beside its buckets: those of micro-batches that are not reduced stay where
    backward makes them, and are copied when the last one is. In place of those, and beside whole
    gradients without DDP, fp32 sums of those in bf16.

    Seen of torch 2.13's DistributedDataParallel with gradient_as_bucket_view, under no_sync, with
    gradients that are freed after each step.
    """
    by_ddp = layout.sharding == "ddp" and not training.traits.half_parameters
    is_bare = is_without_ddp(training=training, layout=layout)
    of = formats(training=training, layout=layout)
    if by_ddp and adds_in_fp32(training=training, layout=layout):
        # without DDP's buckets, a gradient takes the place of its sum
        return (FP32_BYTES - of.kept_gradient * int(is_bare)) * elements
    by_ddp &= layout.pp == 1 and not is_bare
    accumulates = layout.gradient_sync == "last" and layout.num_microbatches > 1
    return of.kept_gradient * elements if by_ddp and accumulates else 0


def _bucket_copy_bytes(*, training: Training, layout: Layout, elements: int) -> int:
    """DDP's bucket in the reduce dtype, where its gradients have another; under ZeRO-2 the
    unreduced bucket and the one that is being filled."""
    of = formats(training=training, layout=layout)
    bucket = min(layout.ddp_bucket_bytes // of.kept_gradient, elements)
    if layout.sharding == "zero2":
        return 2 * bucket * of.reduced
    return bucket * _copied_bytes(training=training, layout=layout)


POWERSGD_COPIES = 2
"""The bucket as it was, and what the sum of its parts lacks, beside the error of before."""


def _copied_bytes(*, training: Training, layout: Layout) -> int:
    """What a DDP bucket needs while it is reduced, beside itself: of one of its elements."""
    if training.powersgd_rank:
        return POWERSGD_COPIES * FP32_BYTES if layout.data_parallel > 1 else 0
    of = formats(training=training, layout=layout)
    return of.reduced if _casts_buckets(training=training, layout=layout) else 0


def _table_copy_bytes(case: Case, stage: Stage, *, copied_bytes: int, elements: int) -> int:
    """For the last bucket, which the embedding's table fills; gradients that earlier micro-batches
    left apart are in their buckets by then, but for the table's."""
    if not stage.has_embedding or not trains_ends(case.model):
        return 0
    layout = case.layout
    table = case.model.vocab_rows(layout.tp) // layout.tp * case.model.hidden
    gone = _accumulated_bytes(training=case.training, layout=layout, elements=elements - table)
    return max(0, copied_bytes * table - gone)


def _casts_buckets(*, training: Training, layout: Layout) -> bool:
    """Whether there is DDP, and its gradients are reduced in another dtype than their own."""
    of = formats(training=training, layout=layout)
    is_cast = layout.sharding != "fsdp" and of.reduced != of.kept_gradient
    is_cast &= layout.data_parallel * layout.cp > 1
    return is_cast and not training.traits.half_parameters


def message_buffer_bytes(case: Case, stage: Stage, *, in_flight: int, message_bytes: int) -> int:
    """What pipelining holds of its messages.

    Torch's schedules have a buffer for each message that a rank receives in a step, inputs and
    gradients; newer ones, for one of each kind. Other softwares receive inputs into what the first
    block keeps, and hold outputs of the micro-batches in flight as their trait says.
    """
    training, layout = case.training, case.layout
    if layout.pp == 1:
        return 0
    traits = training.traits
    if traits.frees_messages:
        return message_bytes
    if not traits.half_parameters:
        ends = int(stage.has_embedding) + int(stage.has_head) + 2 * stage.inner_boundaries
        received = 2 * layout.virtual_stages - ends
        if has_lean_pipelines(training):
            kept = _kept_messages(layout=layout, stage=stage)
            return (received + (layout.num_microbatches - 1) * kept) * message_bytes
        return layout.num_microbatches * received * message_bytes
    match traits.pipeline_outputs:
        case "freed":
            return message_bytes
        case "split":
            return -(-in_flight * message_bytes // layout.tp)
        case "kept":
            return in_flight * message_bytes


def _kept_messages(*, layout: Layout, stage: Stage) -> int:
    """Messages of a micro-batch that stay to the end of the step where pipelines are lean.

    Gradients that a stage has sent, but under 1F1B, whose ranks wait for each; and inputs of the
    last stage, which losses hold by their graph, unless backward splits it.
    """
    waits = layout.schedule == "1f1b"
    sent = layout.virtual_stages - int(stage.has_embedding) - stage.inner_boundaries
    by_loss = stage.has_head and layout.schedule not in SPLIT_BACKWARD_SCHEDULES
    return int(by_loss) + (0 if waits else sent)


def _kept_bytes(layout: Layout, gathered_bytes: int) -> int:
    """What stays of a block's gathered parameters between its forward and its backward."""
    match layout.reshard_after_forward:
        case "never":
            return gathered_bytes
        case "always":
            return 0
        case ranks:
            # to as many ranks as share it: FSDP2 then frees it as under always
            return 0 if ranks == layout.shard_ranks else gathered_bytes // ranks
