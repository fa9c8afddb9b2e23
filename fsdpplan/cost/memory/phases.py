"""Phases: the moments of one step at which a rank's memory can be highest.

FSDP2 gathers a unit into a flat buffer, copies it out into parameters, computes and frees it; the
flat buffer of a forward gather lives until the next unit's copy-out is done. Backward gathers the
unit before in advance and keeps the reduce-scatter input of the unit behind until the next
reduction. The embedding's unit is gathered for forward alone; that of the final norm and the head
stays from the end of forward until backward is past it. The root, which has what is in no unit,
maybe both, stays gathered from the first forward to the end of backward. Each function below
returns the candidates of one stretch of that timeline, in the last micro-batch of a step, read off
torch 2.13's `_fsdp_param_group.py` and `_fsdp_collectives.py` and off real FSDP2 steps under fake
tensors. Along a run of units with the same neighbours every quantity is linear in the unit's index,
so the ends of such runs bound the others.

Phases of a rank that holds its parameters whole: DDP, ZeRO-1 and ZeRO-2.

Gradients and their buffers are there all the time. Checked against the trainer's model under
autocast and fake tensors (tests/ground_truth); the reducer's buckets, ZeRO's shards and what other
softwares keep are added by arithmetic.
"""

from __future__ import annotations

from fsdpplan.cost.memory.rank_quantities import Phase, RankSizes
from fsdpplan.cost.model.block_sizes import FP32_BYTES


def fsdp_phases(s: RankSizes) -> list[Phase]:
    """All candidates of an FSDP rank."""
    indices = _bounding_units(s)
    forward = [phase for index in indices for phase in unit_forward_phases(s, index)]
    backward = [phase for index in indices for phase in unit_backward_phases(s, index)]
    return [
        *first_phases(s),
        *forward,
        *loss_phases(s),
        *head_backward_phases(s),
        *backward,
        *last_backward_phases(s),
    ]


def _bounding_units(s: RankSizes) -> list[int]:
    """The ends of runs of units along which every quantity is linear in the index.

    Between runs stand the units that are like no other: the first, behind which nothing was; the
    last, which may be short, and the one before it, behind which that is reduced; and the one from
    whose blocks on everything is kept.
    """
    unlike = {0, s.units - 2, s.units - 1}
    if 0 < s.kept_blocks < s.blocks:
        unlike.add((s.blocks - s.kept_blocks) // s.unit_blocks)
    near = {index + step for index in unlike for step in (-1, 0, 1)}
    return sorted(index for index in near if 0 <= index < s.units)


def first_phases(s: RankSizes) -> list[Phase]:
    """The embedding's unit is gathered."""
    tables, root = s.ends.tables, s.ends.root
    if not tables:
        return []
    copied = root.gathered_bytes + tables.gathered_bytes
    buffers = tables.buffer_bytes + (0 if s.has_lean_units else root.buffer_bytes)
    return [
        Phase(
            name="forward",
            gradients_bytes=s.gradient_bytes(0),
            unsharded_parameters_bytes=copied + buffers,
            gathers_bytes=s.gather_bytes(copied, buffers),
            unsharded_gradients_bytes=s.held_bytes(s.blocks) + s.behind_ends_bytes,
            activations_bytes=s.saved_bytes(0),
        )
    ]


def unit_forward_phases(s: RankSizes, index: int) -> list[Phase]:
    """Forward of unit `index`: its gather beside the buffer of the one before; its computation."""
    before, blocks = index * s.unit_blocks, s.blocks_of(index)
    behind = 0
    if not s.has_lean_units:
        behind = s.unit_blocks * s.prefetched_block_bytes if index else s.ends.first.buffer_bytes
    copied = s.ends.root.gathered_bytes
    copied += before * s.kept_block_bytes + blocks * s.gathered_block_bytes
    parameters = copied + blocks * s.buffer_block_bytes + before * s.copies_block_bytes
    gather = Phase(
        name="forward",
        gradients_bytes=s.gradient_bytes(0),
        unsharded_parameters_bytes=parameters + behind,
        gathers_bytes=s.gather_bytes(copied, behind + blocks * s.buffer_block_bytes),
        unsharded_gradients_bytes=s.held_bytes(s.blocks) + s.behind_ends_bytes,
        activations_bytes=s.saved_bytes(before) + s.block.residual_bytes,
    )
    computes = [
        Phase(
            name="forward",
            gradients_bytes=s.gradient_bytes(0),
            unsharded_parameters_bytes=parameters + (end - before) * s.copies_block_bytes,
            gathers_bytes=s.gather_bytes(copied, blocks * s.buffer_block_bytes),
            unsharded_gradients_bytes=s.held_bytes(s.blocks) + s.behind_ends_bytes,
            activations_bytes=s.saved_bytes(end),
            temporaries_bytes=block.forward_transient_bytes,
        )
        for end, _, block in s.runs(before, blocks)
    ]
    return [gather, *computes]


def loss_phases(s: RankSizes) -> list[Phase]:
    """Head and loss, forward and backward, with everything saved."""
    if not s.logits_elements:
        return []
    head, root = s.ends.head, s.ends.root
    copied = root.gathered_bytes + head.gathered_bytes + s.blocks * s.kept_block_bytes
    kept = copied + s.copies_root_bytes + s.copy_bytes(s.blocks)
    logits = s.element_bytes * s.logits_elements

    def phase(name: str, *, parameters: int, gradients: int, logits: int, extra: int) -> Phase:
        return Phase(
            name=name,
            gradients_bytes=s.gradient_bytes(0),
            unsharded_parameters_bytes=kept + parameters,
            gathers_bytes=s.gather_bytes(copied, parameters),
            unsharded_gradients_bytes=s.held_bytes(s.blocks) + s.behind_ends_bytes + gradients,
            activations_bytes=s.saved_bytes(s.blocks)
            + s.last_residual_bytes
            + s.last_normed_bytes
            + extra,
            logits_bytes=logits,
        )

    last_blocks = s.blocks_of(s.units - 1)
    buffer = head.buffer_bytes if head else last_blocks * s.buffer_block_bytes
    behind = 0 if s.has_lean_units else last_blocks * s.buffer_block_bytes
    gather = phase("forward", parameters=buffer + behind, gradients=0, logits=0, extra=0)
    first = [gather] if head else []
    if s.pieces is not None:
        made = s.pieces.weight_gradient
        return [
            *first,
            phase(
                "loss",
                parameters=0,
                gradients=made,
                logits=s.pieces.logits,
                extra=s.pieces.hidden,
            ),
            phase(
                "loss",
                parameters=0,
                gradients=made + s.pieces.product,
                logits=s.pieces.logits_gradient,
                extra=s.pieces.hidden,
            ),
        ]
    return [
        *first,
        phase(
            "forward",
            parameters=buffer,
            gradients=0,
            logits=logits + s.logits_gather_bytes,
            extra=0,
        ),
        phase(
            "loss",
            parameters=0,
            gradients=0,
            logits=s.loss_element_bytes * s.logits_elements,
            extra=0,
        ),
        phase(
            "loss",
            parameters=last_blocks * s.prefetched_block_bytes if s.regathers else 0,
            gradients=s.head_gradient_made_bytes,
            logits=logits,
            extra=s.last_normed_bytes,
        ),
    ]


def head_backward_phases(s: RankSizes) -> list[Phase]:
    """The reduction of a unit of the final norm and the head, beside what is gathered ahead."""
    head, root = s.ends.head, s.ends.root
    if not head:
        return []
    last_blocks = s.blocks_of(s.units - 1)
    prefetched = last_blocks * s.prefetched_block_bytes if s.regathers else 0
    beside = s.behind_ends_bytes if s.keeps_reduction_behind else 0
    copied = root.gathered_bytes + s.blocks * s.kept_block_bytes
    held = s.held_bytes(s.blocks)

    def phase(*, gradients: int, shards: int) -> Phase:
        return Phase(
            name="backward",
            gradients_bytes=s.gradient_bytes(0) + shards,
            unsharded_parameters_bytes=copied + prefetched + s.copy_bytes(s.blocks),
            gathers_bytes=s.gather_bytes(copied, prefetched),
            unsharded_gradients_bytes=gradients + beside + head.reduce_bytes,
            activations_bytes=s.saved_bytes(s.blocks) + s.block.residual_bytes,
        )

    last_gradient = 0 if s.has_lean_units else head.last_gradient_bytes
    return [
        phase(gradients=held + head.gradient_bytes, shards=0),
        phase(
            gradients=held - head.held_bytes + last_gradient,
            shards=head.shard_elements * s.reduced_bytes,
        ),
    ]


def unit_backward_phases(s: RankSizes, index: int) -> list[Phase]:
    """Backward of unit `index`: its copy-out, its computation, its reduction."""
    before, blocks = index * s.unit_blocks, s.blocks_of(index)
    done = s.blocks - before - blocks
    head = s.ends.head
    kept = s.ends.root.gathered_bytes + before * s.kept_block_bytes
    prefetched = s.unit_blocks * s.prefetched_block_bytes if s.regathers and index else 0
    behind = s.blocks_of(index + 1) * s.reduce_block_bytes
    if not done:
        behind = head.reduce_bytes if head else s.behind_ends_bytes
    beside = behind if s.keeps_reduction_behind and (done or head) else 0
    held = s.held_bytes(before + blocks) - head.held_bytes
    held += 0 if head else s.head_gradient_bytes
    last_gradient = 0 if s.has_lean_units else s.block.last_weight_gradient_bytes

    def phase(
        *,
        copied: int,
        buffers: int,
        copies: int,
        gradients: int,
        shards: int,
        saved: int,
        extra: int = 0,
    ) -> Phase:
        return Phase(
            name="backward",
            gradients_bytes=s.gradient_bytes(done, ends=head.shard_elements) + shards,
            unsharded_parameters_bytes=kept + copied + buffers + copies,
            gathers_bytes=s.gather_bytes(kept + copied, buffers),
            unsharded_gradients_bytes=held + gradients,
            activations_bytes=saved + s.block.residual_bytes,
            temporaries_bytes=extra,
        )

    copies = s.copy_bytes(before + blocks)
    copy_out = phase(
        copied=blocks * (s.gathered_block_bytes + s.kept_block_bytes),
        buffers=blocks * s.buffer_block_bytes,
        copies=copies,
        gradients=behind,
        shards=0,
        saved=s.saved_bytes(before + blocks),
    )
    computes = [
        phase(
            copied=blocks * s.gathered_block_bytes,
            buffers=prefetched,
            copies=s.copy_bytes(end),
            gradients=behind,
            shards=0,
            saved=s.saved_bytes(end) + block.live_bytes - block.saved_bytes,
            extra=block.backward_peak_bytes
            + (before + blocks - end) * block.weight_gradient_bytes
            # of the later blocks of the run, when the first is at work
            + max(0, (number - 1) * (block.weight_gradient_bytes - block.saved_bytes)),
        )
        for end, number, block in s.runs(before, blocks)
    ]
    copy_in = phase(
        copied=0,
        buffers=prefetched,
        copies=s.copy_bytes(before),
        gradients=blocks * (s.reduce_block_bytes + s.block_gradient_bytes) + beside,
        shards=0,
        saved=s.saved_bytes(before),
    )
    reduced = phase(
        copied=0,
        buffers=prefetched,
        copies=s.copy_bytes(before),
        gradients=blocks * (s.reduce_block_bytes - s.held_block_bytes) + beside + last_gradient,
        shards=blocks * s.shard_block_elements * s.reduced_bytes,
        saved=s.saved_bytes(before),
    )
    return [*([copy_out] if s.regathers else []), *computes, copy_in, reduced]


def last_backward_phases(s: RankSizes) -> list[Phase]:
    """After the last block: the embedding's backward, then the reductions that are left."""
    tables, head, root = s.ends.tables, s.ends.head, s.ends.root
    held = tables.held_bytes + root.held_bytes
    embedding = Phase(
        name="backward",
        gradients_bytes=s.gradient_bytes(s.blocks, ends=head.shard_elements),
        unsharded_parameters_bytes=root.gathered_bytes,
        gathers_bytes=s.gather_bytes(root.gathered_bytes, 0),
        unsharded_gradients_bytes=(0 if head else s.head_gradient_bytes)
        + s.embedding_gradient_bytes
        + s.blocks_of(0) * s.reduce_block_bytes
        + held,
        activations_bytes=s.block.residual_bytes + s.other_micro_batches_bytes,
    )
    phases, reduced = [embedding], head.shard_elements
    behind = s.blocks_of(0) * s.reduce_block_bytes
    waiting = tables.gradient_bytes + root.gradient_bytes
    for end in (root, tables):
        if not end:
            continue
        beside = behind if s.keeps_reduction_behind else 0
        copy_in = Phase(
            name="backward",
            gradients_bytes=s.gradient_bytes(s.blocks, ends=reduced),
            unsharded_gradients_bytes=waiting + held + end.reduce_bytes + beside,
            activations_bytes=s.other_micro_batches_bytes,
        )
        waiting, held = waiting - end.gradient_bytes, held - end.held_bytes
        last_gradient = 0 if s.has_lean_units else end.last_gradient_bytes
        returned = Phase(
            name="backward",
            gradients_bytes=s.gradient_bytes(s.blocks, ends=reduced)
            + end.shard_elements * s.reduced_bytes,
            unsharded_gradients_bytes=waiting + held + end.reduce_bytes + beside + last_gradient,
            activations_bytes=s.other_micro_batches_bytes,
        )
        phases += [copy_in, returned]
        reduced, behind = reduced + end.shard_elements, end.reduce_bytes
    return phases


def ddp_phases(s: RankSizes) -> list[Phase]:
    """All candidates of a rank with whole parameters.

    Autocast copies each matrix to the compute dtype. The copies stay to the end of forward, and to
    backward unless it recomputes. Backward frees them with the saved activations, so the last
    block's is the highest, of those that recompute and of those that do not; where gradients in the
    compute dtype gather until its end, the first block's may be.
    """

    def phase(
        name: str, *, parameters: int, activations: int, gradients: int = 0, extra: int = 0
    ) -> Phase:
        return Phase(
            name=name,
            gradients_bytes=s.resident_gradient_bytes,
            unsharded_parameters_bytes=parameters,
            unsharded_gradients_bytes=gradients
            + (s.bucket_copy_bytes if name == "backward" else 0)
            + s.whole_table_gradient_bytes,
            activations_bytes=activations + s.message_buffers_bytes,
            temporaries_bytes=extra,
        )

    runs = s.runs(0, s.blocks)
    forward = [
        phase(
            "forward",
            parameters=end * s.copies_block_bytes,
            activations=s.saved_bytes(end),
            extra=block.forward_transient_bytes,
        )
        for end, _, block in runs
    ]
    backward = [
        phase(
            "backward",
            parameters=s.copy_bytes(left),
            gradients=s.head_gradient_bytes + (s.blocks - left) * s.grown_block_bytes,
            activations=s.saved_bytes(left)
            + block.live_bytes
            - block.saved_bytes
            + block.residual_bytes,
            extra=block.backward_peak_bytes,
        )
        for end, number, block in runs
        for left in sorted({end - number + 1, end})
    ]
    embedding = phase(
        "backward",
        parameters=0,
        gradients=s.head_gradient_bytes
        + s.embedding_gradient_bytes
        + s.blocks * s.grown_block_bytes,
        activations=s.block.residual_bytes + _others_at_the_embedding(s),
    )
    grown = phase(
        "backward",
        parameters=0,
        gradients=s.blocks * s.grown_block_bytes + s.grown_root_bytes,
        activations=s.other_micro_batches_bytes,
    )
    logits = phase(
        "forward",
        parameters=s.blocks * s.copies_block_bytes + s.copies_root_bytes,
        activations=s.saved_bytes(s.blocks) + 2 * s.last_residual_bytes + s.last_normed_bytes,
        extra=s.element_bytes * s.logits_elements + s.logits_gather_bytes,
    )
    # a bucket that the gradient of a table has filled is as large as that, and then reduced
    reduced = [
        phase(
            "backward",
            parameters=s.copy_bytes(left),
            activations=s.saved_bytes(left) + s.last_residual_bytes,
            extra=copied - s.bucket_copy_bytes,
        )
        for left, copied in ((s.blocks, s.head_copy_bytes), (0, s.table_copy_bytes))
        if copied > s.bucket_copy_bytes
    ]
    # what a pipeline's last micro-batch has sent, when the others are through
    sent = phase(
        "backward",
        parameters=0,
        gradients=s.sent_copies_bytes + s.embedding_gradient_bytes - s.bucket_copy_bytes,
        activations=0,
    )
    whole = [logits] if s.pieces is None else []
    return [*forward, *whole, *_loss_phases(s), *backward, embedding, *reduced, sent, grown]


def _others_at_the_embedding(s: RankSizes) -> int:
    """What other micro-batches of a pipeline hold when the blocks of its first stage are done: the
    blocks of the rank's other stages among them."""
    if not s.other_micro_batches_bytes:
        return 0
    return max(
        (
            s.saved_bytes_by(moment.alive, kept=moment.kept)
            + (moment.kept if s.recomputes else moment.alive) * s.copies_block_bytes
            for moment in s.moments.embedding
        ),
        default=0,
    )


def _loss_phases(s: RankSizes) -> list[Phase]:
    """The loss, forward and backward; then the head's backward and the cast of its gradient."""
    pieces = s.pieces
    copies = (s.kept_blocks if s.recomputes else s.blocks) * s.copies_block_bytes
    saved = s.saved_bytes(s.blocks) + s.last_residual_bytes + s.message_buffers_bytes

    def phase(*, activations: int, logits_bytes: int, parameters: int, gradients: int) -> Phase:
        return Phase(
            name="loss",
            gradients_bytes=s.resident_gradient_bytes,
            unsharded_parameters_bytes=copies + parameters,
            unsharded_gradients_bytes=gradients + s.whole_table_gradient_bytes,
            activations_bytes=saved + activations,
            logits_bytes=logits_bytes,
        )

    if pieces is not None:
        both = s.last_normed_bytes + pieces.hidden
        return [
            phase(
                activations=both,
                logits_bytes=pieces.logits,
                parameters=s.copies_root_bytes,
                gradients=pieces.weight_gradient,
            ),
            phase(
                activations=both,
                logits_bytes=pieces.logits_gradient,
                parameters=s.copies_root_bytes,
                gradients=pieces.weight_gradient + pieces.product,
            ),
        ]
    head = s.head_gradient_made_bytes
    loss = phase(
        activations=s.last_normed_bytes,
        logits_bytes=s.loss_element_bytes * s.logits_elements,
        parameters=s.copies_root_bytes,
        gradients=0,
    )
    backward = phase(
        activations=2 * s.last_normed_bytes,
        logits_bytes=s.element_bytes * s.logits_elements,
        parameters=s.copies_root_bytes,
        gradients=head,
    )
    is_cast = s.element_bytes < FP32_BYTES and s.copies_root_bytes > 0
    gradient_cast = phase(
        activations=s.last_residual_bytes,
        logits_bytes=0,
        parameters=0,
        gradients=3 * head if is_cast else head,
    )
    return [loss, backward, gradient_cast]
