"""Phases of a rank that holds its parameters whole: DDP, ZeRO-1 and ZeRO-2.

Gradients and their buffers are there all the time. Checked against the trainer's model under
autocast and fake tensors (tests/ground_truth); the reducer's buckets, ZeRO's shards and what other
softwares keep are added by arithmetic. What FSDP allocates is in `fsdp_moments`.
"""

from __future__ import annotations

from fsdpplan.cost.memory.rank_quantities import RankSizes
from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.cost.play.heap import Phase


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
