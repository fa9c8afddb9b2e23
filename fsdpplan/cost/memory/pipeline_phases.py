"""Phases of a pipeline rank: the moments of one step at which its memory can be highest.

Under torch's schedules with reshard never, a rank gathers its blocks once and keeps them to the end
of the step; where stages are resharded, moments say which blocks are there. Unsharded gradients of
the reduce dtype grow in a stage's first backward and stay until they are reduced after its last; a
buffer waits for each message of the step from its beginning.

Source: torch 2.13 `torch/distributed/pipelining/stage.py`; checked against its schedules under a
fake process group (tests/ground_truth).
"""

from __future__ import annotations

from fsdpplan.cost.memory.rank_quantities import EndSizes, RankSizes
from fsdpplan.cost.play.heap import Phase
from fsdpplan.cost.schedule.moments import Moment


def pipeline_phases(s: RankSizes) -> list[Phase]:
    """All candidates of one pipeline rank that shards with FSDP."""
    # the weights' half of a split backward pass leaves it, and moments say when
    head_gradient = 0 if s.split.fresh_head_bytes else s.head_gradient_bytes

    def phase(
        name: str,
        *,
        activations: int,
        held: int,
        parameters: int,
        gathers: int = 0,
        extra: int = 0,
        reduced: int = 0,
    ) -> Phase:
        return Phase(
            name=name,
            gradients_bytes=reduced * s.shard_block_elements * s.later_gradient_bytes,
            unsharded_parameters_bytes=parameters,
            gathers_bytes=gathers,
            unsharded_gradients_bytes=held,
            activations_bytes=activations + s.message_buffers_bytes,
            temporaries_bytes=extra,
        )

    between = [(moment, 0) for moment in s.moments.between]
    between += [(moment, s.split.summed_matrix_bytes) for moment in s.moments.sums]
    ends = [
        *(
            phase(
                "backward",
                activations=_alive(s, moment),
                held=_held(s, moment) + beside,
                parameters=_gathered(s, moment),
                reduced=moment.reduced,
            )
            for moment, beside in between
        ),
        *(
            phase(
                "backward",
                activations=_alive(s, moment),
                held=_held(s, moment) + head_gradient + s.embedding_gradient_bytes,
                parameters=_gathered(s, moment),
                reduced=moment.reduced,
            )
            for moment in s.moments.embedding
        ),
        *(
            phase(
                "backward",
                activations=_alive(s, moment),
                held=_held(s, moment) + head_gradient,
                parameters=_gathered(s, moment),
                reduced=moment.reduced,
            )
            for moment in s.moments.after
        ),
        *(
            phase(
                "backward",
                activations=_alive(s, moment),
                held=_held(s, moment) + buffer,
                parameters=_gathered(s, moment) - let_go,
                reduced=moment.reduced,
            )
            for moment, buffer, let_go in _reductions(s)
        ),
    ]
    loss = _loss_phases(s) if s.logits_elements else []
    if not s.blocks:  # the head alone: no block is ever at work
        return ends + loss
    forward = [(moment, s.block) for moment in s.moments.forward]
    forward += [(moment, s.kept) for moment in s.moments.forward_kept]
    backward = [(moment, s.block) for moment in s.moments.backward]
    backward += [(moment, s.kept) for moment in s.moments.backward_kept]
    return [
        *(
            phase(
                "forward",
                activations=_saved(s, moment) + s.beside_blocks_bytes,
                held=0,
                parameters=_gathered(s, moment) + s.gathered_block_bytes,
                gathers=s.gathered_block_bytes,
            )
            for moment, _ in forward
        ),
        *(
            phase(
                "forward",
                activations=_alive(s, moment),
                held=_held(s, moment),
                extra=block.forward_transient_bytes,
                parameters=_gathered(s, moment),
                reduced=moment.reduced,
            )
            for moment, block in forward
        ),
        *(
            phase(
                "backward",
                activations=_alive(s, moment)
                + block.live_bytes
                - block.saved_bytes
                + block.residual_bytes,
                held=_held(s, moment) + head_gradient,
                extra=block.backward_peak_bytes,
                parameters=_gathered(s, moment),
                reduced=moment.reduced,
            )
            for moment, block in backward
        ),
        *(
            phase(
                "backward",
                activations=_alive(s, moment)
                + s.block.live_bytes
                - s.block.saved_bytes
                + s.block.residual_bytes,
                held=_held(s, moment),
                extra=s.block.inputs_half_peak_bytes,
                parameters=_gathered(s, moment),
                reduced=moment.reduced,
            )
            for moment in s.moments.halves
        ),
        *ends,
        *loss,
    ]


def _gathered(s: RankSizes, moment: Moment) -> int:
    """Parameters of the stages that the rank is at or will soon be at, and of the root."""
    if s.keeps_stages:
        ends = int(s.pipeline_ends > 0) * s.ends.gathered_bytes
        return ends + s.blocks * s.gathered_block_bytes
    ends = s.ends.gathered_bytes if s.pipeline_ends + moment.dropped_ends else 0
    return ends + (s.blocks + moment.dropped) * s.gathered_block_bytes


def _saved(s: RankSizes, moment: Moment) -> int:
    """What blocks saved of all micro-batches in flight, and what the first stage has sent."""
    sent = 0 if s.frees_messages else moment.outputs * s.block.residual_bytes
    return s.saved_bytes_by(moment.alive, kept=moment.kept) + sent


def _alive(s: RankSizes, moment: Moment) -> int:
    """Activations in flight."""
    beside = s.beside_blocks_bytes if moment.alive else 0
    return _saved(s, moment) + beside + s.split.bytes_at(moment)


def _held(s: RankSizes, moment: Moment) -> int:
    """Gradients of earlier micro-batches."""
    ends = min(1.0, moment.ends / max(1, s.pipeline_ends))
    graded = min(moment.graded, s.graded_blocks)
    return max(0, graded) * s.held_block_bytes + round(ends * s.ends.held_bytes)


def _reductions(s: RankSizes) -> list[tuple[Moment, int, int]]:
    """When gradients are reduced, what is made for it, and the unit's gathered parameters, which
    are gone by then: those of units of the ends before or behind the blocks. FSDP2 refers to the
    gradient registered last, of such a unit nearly all, beside what its reduction returns."""
    block, whole = (
        max(s.reduce_block_bytes, s.reduce_experts_bytes),
        s.reduce_block_bytes + s.reduce_experts_bytes,
    )
    unit = (0, 0)
    if s.blocks and whole:
        unit = (s.unit_blocks * block, s.unit_blocks * s.gathered_block_bytes * block // whole)

    def of(end: EndSizes) -> tuple[int, int]:
        returned = 0 if s.has_lean_units else end.shard_elements * s.reduced_bytes
        return (end.reduce_bytes + returned, end.gathered_bytes)

    first, last = [s.ends.tables, s.ends.root], [s.ends.head]
    if s.reduces_tables_last:
        first, last = last, first
    before = [unit, *(of(end) for end in first if end)]
    found = [(moment, *one) for moment in s.moments.reduction for one in before]
    behind = [of(end) for end in last if end]
    return [*found, *((moment, *one) for moment in s.moments.root_reduction for one in behind)]


def _loss_phases(s: RankSizes) -> list[Phase]:
    """The loss; the stage keeps its output, the logits, until its backward.

    Where all losses are made before the first backward pass, the next one makes the head's gradient
    beside those of the first, and beside the gradient of its logits.
    """
    kept = s.last_residual_bytes + s.last_normed_bytes + s.message_buffers_bytes
    sizes = [(0, 0, s.loss_element_bytes * s.logits_elements)]
    if s.pieces is not None:
        made, hidden = s.pieces.weight_gradient, s.pieces.hidden
        sizes = [(hidden, *moment) for moment in s.pieces.moments]
        sizes.append((hidden, made + s.pieces.cast_gradient, 0))
    are_first = not any(moment.graded or moment.inputs for moment in s.moments.loss)
    later = s.moments.after if are_first and s.pieces is None else ()
    return [
        Phase(
            name="loss",
            unsharded_parameters_bytes=_gathered(s, moment),
            unsharded_gradients_bytes=_held(s, moment) + made,
            activations_bytes=_alive(s, moment) + kept + hidden,
            logits_bytes=logits,
        )
        for moment in s.moments.loss
        for hidden, made, logits in sizes
    ] + [
        Phase(
            name="loss",
            unsharded_parameters_bytes=_gathered(s, moment),
            unsharded_gradients_bytes=_held(s, moment) + s.head_gradient_made_bytes,
            activations_bytes=_alive(s, moment) + s.message_buffers_bytes,
            logits_bytes=s.loss_gradient_element_bytes * s.logits_elements,
        )
        for moment in later
        if moment.alive
    ]
