"""Memory of a pipeline rank under FSDP, at each moment of what it does.

Under torch's schedules with reshard never, a rank gathers its blocks once and keeps them to the end
of the step; where stages are resharded, moments say which blocks are there. Unsharded gradients of
the reduce dtype grow in a stage's first backward and stay until they are reduced after its last; a
buffer waits for each message of the step from its beginning.

Source: torch 2.13 `torch/distributed/pipelining/stage.py`; checked against its schedules under a
fake process group (tests/ground_truth).
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.memory.rank_quantities import EndSizes, RankSizes
from fsdpplan.cost.play.heap import Phase
from fsdpplan.cost.schedule.moments import Moment

AT_WORK = ("forward", "forward of kept", "backward", "backward of kept", "half")
"""Moments at which a block is."""


def pipeline_phases(s: RankSizes) -> list[Phase]:
    """All candidates of one pipeline rank that shards with FSDP."""
    return [phase for moment in s.moments for phase in moment_phases(s, moment)]


def moment_phases(s: RankSizes, moment: Moment) -> Iterator[Phase]:
    """What is there at a moment."""
    # the weights' half of a split backward pass leaves it, and moments say when
    head = 0 if s.split.fresh_head_bytes else s.head_gradient_bytes
    kind = moment.kind
    block = s.kept if kind.endswith("of kept") else s.block
    if not s.blocks and kind in AT_WORK:  # the head alone
        return
    remade = block.live_bytes - block.saved_bytes + block.residual_bytes
    match kind:
        case "forward" | "forward of kept":
            yield Phase(
                name="forward",
                unsharded_parameters_bytes=_gathered(s, moment) + s.gathered_block_bytes,
                gathers_bytes=s.gathered_block_bytes,
                activations_bytes=_saved(s, moment)
                + s.beside_blocks_bytes
                + s.message_buffers_bytes,
            )
            temporaries = block.forward_transient_bytes
            yield _phase(s, moment, name="forward", temporaries=temporaries)
        case "backward" | "backward of kept":
            temporaries = block.backward_peak_bytes
            yield _phase(s, moment, gradients=head, remade=remade, temporaries=temporaries)
        case "half":
            yield _phase(s, moment, remade=remade, temporaries=block.inputs_half_peak_bytes)
        case "between":
            yield _phase(s, moment)
        case "sums":
            yield _phase(s, moment, gradients=s.split.summed_matrix_bytes)
        case "embedding":
            yield _phase(s, moment, gradients=head + s.embedding_gradient_bytes)
        case "after" | "after all losses":
            yield _phase(s, moment, gradients=head)
            if kind == "after all losses" and moment.alive and s.pieces is None:
                yield from _next_loss(s, moment)
        case "reduction" | "root reduction":
            for buffer, let_go in _reduced(s, is_behind=kind == "root reduction"):
                yield _phase(s, moment, gradients=buffer, let_go=let_go)
        case "loss":
            yield from _losses(s, moment)


def _phase(
    s: RankSizes,
    moment: Moment,
    *,
    name: str = "backward",
    gradients: int = 0,
    remade: int = 0,
    temporaries: int = 0,
    let_go: int = 0,
) -> Phase:
    """What is in flight and held, and beside it what is made at that moment."""
    return Phase(
        name=name,
        gradients_bytes=moment.reduced * s.shard_block_elements * s.later_gradient_bytes,
        unsharded_parameters_bytes=_gathered(s, moment) - let_go,
        unsharded_gradients_bytes=_held(s, moment) + gradients,
        activations_bytes=_alive(s, moment) + remade + s.message_buffers_bytes,
        temporaries_bytes=temporaries,
    )


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


def _reduced(s: RankSizes, *, is_behind: bool) -> list[tuple[int, int]]:
    """When gradients are reduced, what is made for it, and the unit's gathered parameters, which
    are gone by then: those of units of the ends before or behind the blocks. FSDP2 refers to the
    gradient registered last, of such a unit nearly all, beside what its reduction returns."""
    first, last = [s.ends.tables, s.ends.root], [s.ends.head]
    if s.reduces_tables_last:
        first, last = last, first

    def of(end: EndSizes) -> tuple[int, int]:
        returned = 0 if s.has_lean_units else end.shard_elements * s.reduced_bytes
        return (end.reduce_bytes + returned, end.gathered_bytes)

    if is_behind:
        return [of(end) for end in last if end]
    block = max(s.reduce_block_bytes, s.reduce_experts_bytes)
    whole = s.reduce_block_bytes + s.reduce_experts_bytes
    unit = (0, 0)
    if s.blocks and whole:
        unit = (s.unit_blocks * block, s.unit_blocks * s.gathered_block_bytes * block // whole)
    return [unit, *(of(end) for end in first if end)]


def _losses(s: RankSizes, moment: Moment) -> Iterator[Phase]:
    """The loss; the stage keeps its output, the logits, until its backward."""
    if not s.logits_elements:
        return
    kept = s.last_residual_bytes + s.last_normed_bytes + s.message_buffers_bytes
    sizes = [(0, 0, s.loss_element_bytes * s.logits_elements)]
    if s.pieces is not None:
        made, hidden = s.pieces.weight_gradient, s.pieces.hidden
        sizes = [(hidden, *moment) for moment in s.pieces.moments]
        sizes.append((hidden, made + s.pieces.cast_gradient, 0))
    for hidden, made, logits in sizes:
        yield Phase(
            name="loss",
            unsharded_parameters_bytes=_gathered(s, moment),
            unsharded_gradients_bytes=_held(s, moment) + made,
            activations_bytes=_alive(s, moment) + kept + hidden,
            logits_bytes=logits,
        )


def _next_loss(s: RankSizes, moment: Moment) -> Iterator[Phase]:
    """Where all losses are made before the first backward pass, the next one makes the head's
    gradient beside those of the first, and beside the gradient of its logits."""
    if s.logits_elements:
        yield Phase(
            name="loss",
            unsharded_parameters_bytes=_gathered(s, moment),
            unsharded_gradients_bytes=_held(s, moment) + s.head_gradient_made_bytes,
            activations_bytes=_alive(s, moment) + s.message_buffers_bytes,
            logits_bytes=s.loss_gradient_element_bytes * s.logits_elements,
        )
