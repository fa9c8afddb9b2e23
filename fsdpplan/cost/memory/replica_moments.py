"""Memory of a rank that holds its parameters whole: DDP, ZeRO-1 and ZeRO-2, in the order of their
operations.

Gradients and their buffers are there all the time. Autocast copies each matrix to the compute
dtype. The copies stay to backward, unless that recomputes: then to the end of forward, or no longer
than their products. Backward frees them with the saved activations.

Checked against the trainer's model under autocast and fake tensors (tests/ground_truth); the
reducer's buckets, ZeRO's shards and what other softwares keep are added by arithmetic. What FSDP
allocates is in `fsdp_moments`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdpplan.cost.memory.rank_quantities import RankSizes
from fsdpplan.cost.model.formats import FP32_BYTES
from fsdpplan.cost.play.heap import Heap, Moment, Phase
from fsdpplan.cost.schedule.moments import Moment as RankMoment


def replica_phases(s: RankSizes) -> list[Phase]:
    """All candidates for the peak of a rank with whole parameters.

    Along blocks that are alike every quantity is linear in the index of the block, so the first and
    the last of them bound the others.
    """
    ends = {each - 1 for end, number, _ in s.runs(0, s.blocks) for each in (end - number + 1, end)}
    return [moment.phase for moment in replica_moments(s, sorted(ends))]


def replica_moments(s: RankSizes, blocks: Sequence[int]) -> Iterator[Moment]:
    """A micro-batch through those of its `blocks`, with all that the others leave."""
    heap = Heap(gathers_in_place=False)
    heap.hold("gradients that stay", s.resident_gradient_bytes)
    heap.hold("gradient of the table", s.whole_table_gradient_bytes)
    heap.hold("messages", s.message_buffers_bytes)
    kinds = {end - at: block for end, number, block in s.runs(0, s.blocks) for at in range(number)}
    for index in blocks:
        heap.hold("casts", s.forward_copy_bytes(index + 1))
        heap.hold("saved", s.saved_bytes(index + 1))
        heap.hold("temporaries", kinds[index + 1].forward_transient_bytes)
        yield Moment("forward", index, heap.moment("forward"))
    heap.free("temporaries")
    for phase in (*_head(s, heap), *_head_backward(s, heap)):
        yield Moment("ends", -1, phase)
    heap.hold("stream", s.block.residual_bytes)
    heap.hold("gradient of the head", s.head_gradient_bytes)
    heap.hold("buckets", s.bucket_copy_bytes)
    for index in reversed(blocks):
        block = kinds[index + 1]
        heap.hold("casts", s.copy_bytes(index + 1))
        heap.hold("gradients", (s.blocks - index - 1) * s.grown_block_bytes)
        heap.hold("saved", s.saved_bytes(index + 1))
        heap.hold("stream", block.residual_bytes)
        heap.hold("remade", block.live_bytes - block.saved_bytes)
        heap.hold("temporaries", block.backward_peak_bytes)
        yield Moment("backward", index, heap.moment("backward"))
    heap.free("remade", "temporaries", "casts")
    for phase in _embedding_backward(s, heap):
        yield Moment("last", -1, phase)


def _head(s: RankSizes, heap: Heap) -> Iterator[Phase]:
    """Head and loss, forward and backward; then the head's backward and the cast of its
    gradient."""
    saved = s.saved_bytes(s.blocks)
    if s.pieces is None:
        heap.hold("casts", s.forward_copy_bytes(s.blocks) if s.caches_copies else s.kept_copy_bytes)
        heap.hold("casts of the head", s.copies_root_bytes)
        heap.hold("saved", saved)
        heap.hold("beside the logits", 2 * s.last_residual_bytes + s.last_normed_bytes)
        logits = s.element_bytes * s.logits_elements + s.logits_gather_bytes
        heap.hold("temporaries", logits)
        yield heap.moment("forward")
        heap.free("temporaries")
    heap.hold("casts", s.kept_copy_bytes)
    heap.hold("casts of the head", s.copies_root_bytes)
    heap.hold("saved", saved + s.last_residual_bytes)
    heap.hold("beside the logits", s.last_normed_bytes - s.unkept_normed_bytes)
    if s.pieces is not None:
        heap.hold("beside the logits", s.last_normed_bytes + s.pieces.hidden)
        for gradients, logits in s.pieces.moments:
            heap.hold("gradients", gradients)
            heap.hold("logits", logits)
            yield heap.moment("loss")
    else:
        made = s.head_gradient_made_bytes
        heap.hold("logits", s.loss_element_bytes * s.logits_elements)
        yield heap.moment("loss")
        heap.hold("beside the logits", 2 * s.last_normed_bytes - s.unkept_normed_bytes)
        heap.hold("gradients", made)
        heap.hold("logits", s.element_bytes * s.logits_elements)
        yield heap.moment("loss")
        is_cast = s.element_bytes < FP32_BYTES and s.copies_root_bytes > 0
        heap.free("casts of the head")
        heap.hold("beside the logits", s.last_residual_bytes)
        heap.hold("gradients", 3 * made if is_cast else made)
        heap.hold("logits", 0)
        yield heap.moment("loss")
    heap.free("casts of the head", "beside the logits", "gradients", "logits")


def _head_backward(s: RankSizes, heap: Heap) -> Iterator[Phase]:
    """A bucket that the gradient of a table has filled is as large as that, and then reduced: here
    the head's."""
    if s.head_copy_bytes > s.bucket_copy_bytes:
        heap.hold("casts", s.copy_bytes(s.blocks))
        heap.hold("buckets", s.bucket_copy_bytes)
        heap.hold("temporaries", s.head_copy_bytes - s.bucket_copy_bytes)
        yield heap.moment("backward")
        heap.free("temporaries")


def _embedding_backward(s: RankSizes, heap: Heap) -> Iterator[Phase]:
    """Its gradient; the bucket that this fills, where it is reduced; what a pipeline's last
    micro-batch has sent, when the others are through; and what was gathered to be added."""
    others = _others_at_the_embedding(s)
    heap.hold("gradients", s.blocks * s.grown_block_bytes)
    heap.hold("embedding's gradient", s.embedding_gradient_bytes)
    heap.hold("stream", s.block.residual_bytes)
    heap.hold("saved", others)
    yield heap.moment("backward")
    heap.free("gradients", "gradient of the head", "embedding's gradient", "stream")
    if s.table_copy_bytes > s.bucket_copy_bytes:
        heap.hold("saved", s.saved_bytes(0) + s.last_residual_bytes)
        heap.hold("temporaries", s.table_copy_bytes - s.bucket_copy_bytes)
        heap.hold("casts", s.copy_bytes(0))
        yield heap.moment("backward")
        heap.free("casts", "temporaries")
    heap.free("saved")
    heap.hold("buckets", s.sent_copies_bytes)
    heap.hold("embedding's gradient", s.embedding_gradient_bytes)
    yield heap.moment("backward")
    heap.free("embedding's gradient")
    heap.hold("buckets", s.bucket_copy_bytes)
    heap.hold("gradients", s.blocks * s.grown_block_bytes + s.grown_root_bytes)
    heap.hold("saved", s.other_micro_batches_bytes)
    yield heap.moment("backward")


def _others_at_the_embedding(s: RankSizes) -> int:
    """What other micro-batches of a pipeline hold when the blocks of its first stage are done: the
    blocks of the rank's other stages among them."""
    if not s.other_micro_batches_bytes:
        return 0
    return max(
        (
            s.saved_bytes_by(moment.alive, kept=moment.kept)
            + (moment.kept if s.recomputes else moment.alive) * s.copies_block_bytes
            for moment in s.moments
            if moment.kind == "embedding"
        ),
        default=0,
    )


def pipelined_phase(s: RankSizes, moment: RankMoment) -> Phase:
    """A moment of a pipeline rank: what blocks save of the micro-batches in flight."""
    temporaries = {
        "forward": s.block.forward_transient_bytes,
        "forward of kept": s.kept.forward_transient_bytes,
        "backward": s.block.backward_peak_bytes,
        "backward of kept": s.kept.backward_peak_bytes,
    }
    return Phase(
        name="forward" if moment.kind in ("forward", "forward of kept", "loss") else "backward",
        gradients_bytes=s.resident_gradient_bytes,
        unsharded_gradients_bytes=s.whole_table_gradient_bytes,
        activations_bytes=s.saved_bytes_by(moment.alive, kept=moment.kept)
        + s.message_buffers_bytes,
        temporaries_bytes=temporaries.get(moment.kind, 0),
    )
