"""Phases: the moments of one step at which a rank's memory can be highest.

FSDP2 gathers a unit into a flat buffer, copies it out into parameters, computes and frees it; the
flat buffer of a forward gather lives until the next unit's copy-out is done. Backward gathers the
unit before in advance and keeps the reduce-scatter input of the unit behind until the next
reduction. The embedding's unit is gathered for forward alone; that of the final norm and the head
stays from the end of forward until backward is past it. The root, which has what is in no unit,
maybe both, stays gathered from the first forward to the end of backward. Each function below
returns the candidates of one stretch of that timeline, in the last micro-batch of a step, read off
torch 2.13's `_fsdp_param_group.py` and `_fsdp_collectives.py` and off real FSDP2 steps under fake
tensors. Routed experts that are units of their own come and go within their block: gathered for it
alone, with those of the block before gathered in advance, and reduced as soon as their gradients
are there. Along units that are alike and have like neighbours every quantity is linear in the index
of the unit, so the first and the last of them bound the others.

Phases of a rank that holds its parameters whole: DDP, ZeRO-1 and ZeRO-2.

Gradients and their buffers are there all the time. Checked against the trainer's model under
autocast and fake tensors (tests/ground_truth); the reducer's buckets, ZeRO's shards and what other
softwares keep are added by arithmetic.
"""

from __future__ import annotations

from functools import lru_cache

from fsdpplan.cost.memory.rank_quantities import Phase, RankSizes
from fsdpplan.cost.model.block_sizes import FP32_BYTES


def fsdp_phases(s: RankSizes) -> list[Phase]:
    """All candidates of an FSDP rank."""
    indices = _bounding_units(s.unit_order)
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


@lru_cache(maxsize=1024)
def _bounding_units(order: tuple[int, ...]) -> list[int]:
    """The first and the last of the units that are alike and have like neighbours: along those
    every quantity is linear in the index. `order`: of which kind each unit is."""
    around = (-1, *order, -1)
    alike: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(order)):
        alike.setdefault(around[index : index + 3], []).append(index)
    return sorted({end for indices in alike.values() for end in (indices[0], indices[-1])})


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
    """Forward of unit `index`: its gather beside the buffer of what was gathered before; its
    computation, block by block, beside routed experts that are gathered for each."""
    before, unit = index * s.unit_blocks, s.unit(index)
    behind = 0
    if not s.has_lean_units:
        behind = s.unit(index - 1).last_prefetched_bytes if index else s.ends.first.buffer_bytes
    copied = s.ends.root.gathered_bytes + before * s.kept_block_bytes + unit.gathered_bytes

    def phase(*, copied: int, buffers: int, copies: int, saved: int, extra: int = 0) -> Phase:
        return Phase(
            name="forward",
            gradients_bytes=s.gradient_bytes(0),
            unsharded_parameters_bytes=copied + buffers + copies * s.copies_block_bytes,
            gathers_bytes=s.gather_bytes(copied, buffers),
            unsharded_gradients_bytes=s.held_bytes(s.blocks) + s.behind_ends_bytes,
            activations_bytes=saved,
            temporaries_bytes=extra,
        )

    phases = [
        phase(
            copied=copied,
            buffers=behind + unit.buffer_bytes,
            copies=before,
            saved=s.saved_bytes(before) + s.block.residual_bytes,
        )
    ]
    kept = 0
    for run in unit.runs:
        done = before + run.end
        of_experts = run.experts_bytes + kept + (run.number - 1) * run.experts_kept_bytes
        kept += run.number * run.experts_kept_bytes
        if run.experts_bytes and not s.has_lean_units:
            earlier = run.experts_buffer_bytes if run.number > 1 else unit.buffer_bytes
            phases.append(
                phase(
                    copied=copied + of_experts,
                    buffers=earlier + run.experts_buffer_bytes,
                    copies=done,
                    saved=s.saved_bytes(done - 1) + s.block.residual_bytes,
                )
            )
        phases.append(
            phase(
                copied=copied + of_experts,
                buffers=run.experts_buffer_bytes or unit.buffer_bytes,
                copies=done,
                saved=s.saved_bytes(done),
                extra=run.block.forward_transient_bytes,
            )
        )
    return phases


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

    last = s.unit(s.units - 1)
    last_buffer = last.runs[-1].experts_buffer_bytes or last.buffer_bytes
    buffer = head.buffer_bytes if head else last_buffer
    behind = 0 if s.has_lean_units else last_buffer
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
            parameters=last.prefetched_bytes if s.regathers else 0,
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
    prefetched = s.unit(s.units - 1).prefetched_bytes if s.regathers else 0
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
    before, unit = index * s.unit_blocks, s.unit(index)
    blocks, head = unit.blocks, s.ends.head
    done = s.blocks - before - blocks
    kept = s.ends.root.gathered_bytes + before * s.kept_block_bytes
    prefetched = s.unit(index - 1).prefetched_bytes if s.regathers and index else 0
    if done:
        behind = s.unit(index + 1).reduce_bytes
    else:
        behind = head.reduce_bytes if head else s.behind_ends_bytes
    beside = behind if s.keeps_reduction_behind and (done or head) else 0
    held = s.held_bytes(before + blocks) - head.held_bytes
    held += 0 if head else s.head_gradient_bytes
    last_gradient = 0 if s.has_lean_units else unit.runs[-1].block.last_weight_gradient_bytes

    def phase(
        *,
        copied: int,
        buffers: int,
        copies: int,
        gradients: int,
        saved: int,
        reduced_elements: int = 0,
        shards: int = 0,
        extra: int = 0,
    ) -> Phase:
        reduced_elements += head.shard_elements
        return Phase(
            name="backward",
            gradients_bytes=s.gradient_bytes(done, ends=reduced_elements) + shards,
            unsharded_parameters_bytes=kept + copied + buffers + s.copy_bytes(copies),
            gathers_bytes=s.gather_bytes(kept + copied, buffers),
            unsharded_gradients_bytes=held + gradients,
            activations_bytes=saved + s.block.residual_bytes,
            temporaries_bytes=extra,
        )

    copy_out = phase(
        copied=unit.gathered_bytes + blocks * s.kept_block_bytes,
        buffers=unit.buffer_bytes,
        copies=before + blocks,
        gradients=behind,
        saved=s.saved_bytes(before + blocks),
    )
    computes = []
    experts_kept = sum(run.number * run.experts_kept_bytes for run in unit.runs)
    gradients = reduced_elements = let_go = 0
    for at in range(len(unit.runs) - 1, -1, -1):
        run = unit.runs[at]
        block, end = run.block, before + run.end
        for turn in sorted({0, run.number - 1}):  # the last block of the run, then the first
            earlier = run if turn < run.number - 1 else unit.runs[at - 1] if at else None
            ahead = prefetched
            if earlier and s.regathers:
                ahead = earlier.experts_prefetched_bytes or prefetched
            given = {
                "copies": end - turn,
                "reduced_elements": reduced_elements + turn * run.experts_shard_elements,
                "saved": s.saved_bytes(end - turn) + block.live_bytes - block.saved_bytes,
            }
            made = gradients + turn * block.weight_gradient_bytes
            made -= let_go + turn * run.experts_held_bytes
            if turn:
                behind = run.experts_reduce_bytes or behind
            copied = unit.gathered_bytes
            copied += experts_kept - (turn + 1) * run.experts_kept_bytes
            at_work = {**given, "copied": copied + run.experts_bytes, "gradients": made + behind}
            if run.experts_bytes and s.regathers:
                computes.append(phase(buffers=run.experts_buffer_bytes, **at_work))
            if block.live_bytes > block.saved_bytes and not s.has_lean_units:
                # recomputation is a forward pass, behind which their buffer is still there
                ahead = max(ahead, run.experts_buffer_bytes)
            computes.append(phase(buffers=ahead, extra=block.backward_peak_bytes, **at_work))
            if block.reduced_peak_bytes:
                made += behind if s.keeps_reduction_behind else 0
                extra = block.reduced_peak_bytes
                computes.append(
                    phase(buffers=ahead, copied=copied, gradients=made, extra=extra, **given)
                )
        gradients += run.number * block.weight_gradient_bytes
        reduced_elements += run.number * run.experts_shard_elements
        let_go += run.number * run.experts_held_bytes
        experts_kept -= run.number * run.experts_kept_bytes
        behind = run.experts_reduce_bytes or behind
    copy_in = phase(
        copied=0,
        buffers=prefetched,
        copies=before,
        gradients=unit.reduce_bytes + unit.gradient_bytes + beside - let_go,
        reduced_elements=reduced_elements,
        saved=s.saved_bytes(before),
    )
    reduced = phase(
        copied=0,
        buffers=prefetched,
        copies=before,
        gradients=unit.reduce_bytes - blocks * s.held_block_bytes + beside + last_gradient,
        reduced_elements=reduced_elements,
        shards=unit.shard_elements * s.reduced_bytes,
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
        + s.unit(0).reduce_bytes
        + held,
        activations_bytes=s.block.residual_bytes + s.other_micro_batches_bytes,
    )
    phases, reduced = [embedding], head.shard_elements
    behind = s.unit(0).reduce_bytes
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

    Autocast copies each matrix to the compute dtype. The copies stay to backward, unless that
    recomputes: then to the end of forward, or no longer than their products. Backward frees them
    with the saved activations, so the last block's is the highest, of those that recompute and of
    those that do not; where gradients in the compute dtype gather until its end, the first block's
    may be.
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
            parameters=s.forward_copy_bytes(end),
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
        parameters=s.copies_root_bytes
        + (s.blocks * s.copies_block_bytes if s.caches_copies else s.kept_copy_bytes),
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
    copies = s.kept_copy_bytes
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
