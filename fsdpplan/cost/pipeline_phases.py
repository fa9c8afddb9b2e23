"""Phases of a pipeline rank: the moments of one step at which its memory can be highest.

Under torch's schedules with reshard never, a rank gathers its blocks once and keeps them to the end
of the step; unsharded gradients of the reduce dtype grow in the first backward and stay until all
are reduced at the end; a buffer waits for each message of the step from its beginning.

Source: torch 2.13 `torch/distributed/pipelining/stage.py`; checked against its schedules under a
fake process group (tests/ground_truth).
"""

from __future__ import annotations

from fsdpplan.cost.rank_quantities import Phase, RankSizes


def pipeline_phases(s: RankSizes) -> list[Phase]:
    """All candidates of one pipeline rank that shards with FSDP."""
    gathered = s.gathered_root + s.blocks * s.gathered_block
    in_flight = s.saved(s.blocks)
    later = in_flight if s.is_steady else in_flight - s.looped_blocks * s.block.saved_bytes

    def phase(
        name: str,
        *,
        activations: int,
        held: int,
        parameters: int = gathered,
        gathers: int = 0,
        logits: int = 0,
        extra: int = 0,
    ) -> Phase:
        return Phase(
            name=name,
            unsharded_parameters=parameters,
            gathers=gathers,
            unsharded_gradients=held,
            activations=activations + s.message_buffers,
            logits=logits,
            temporaries=extra,
        )

    held = s.held(s.blocks)
    # looped: the last stage's gradients are there before the others'
    later_held = [(later, s.held(s.looped_blocks))]
    if s.looped_blocks < s.blocks:
        later_held.append((in_flight * (s.blocks - s.looped_blocks) // s.blocks, held))
    reduced = max(s.reduce_block if s.blocks else 0, s.reduce_root)
    recomputed = s.block.live_bytes - s.block.saved_bytes + s.block.residual_bytes
    backward_peak = s.block.backward_peak_bytes
    candidates = [
        phase(
            "forward",
            activations=in_flight,
            held=0,
            parameters=gathered + s.gathered_block,
            gathers=s.gathered_block,
        ),
        phase(
            "forward",
            activations=in_flight,
            held=held if s.is_steady else 0,
            extra=s.block.forward_transient_bytes,
        ),
        phase(
            "backward",
            activations=in_flight + recomputed,
            held=s.head_gradient,
            extra=backward_peak,
        ),
        *(
            phase(
                "backward",
                activations=activations + recomputed,
                held=gradients + s.head_gradient,
                extra=backward_peak,
            )
            for activations, gradients in later_held
        ),
        phase(
            "backward",
            activations=s.other_micro_batches if s.is_steady else 0,
            held=held + s.head_gradient + s.embedding_gradient,
        ),
        phase("backward", activations=0, held=held + reduced),
    ]
    if not s.blocks:  # the head alone: no block is ever at work
        candidates = candidates[-2:]
    return candidates + (_loss_phases(s, in_flight, later, gathered) if s.logits_elements else [])


def _loss_phases(s: RankSizes, in_flight: int, later: int, gathered: int) -> list[Phase]:
    """The loss with the first backward to come, and with gradients held; the stage keeps its
    output, the logits, until its backward."""
    kept = s.last_residual + s.last_normed + s.message_buffers
    sizes = [(0, 0, (s.loss_element_bytes + s.element_bytes) * s.logits_elements)]
    if s.pieces is not None:
        made, hidden = s.pieces.weight_gradient, s.pieces.hidden
        sizes = [
            (hidden, made, s.pieces.logits),
            (hidden, made + s.pieces.product, s.pieces.logits_gradient),
        ]
    return [
        Phase(
            name="loss",
            unsharded_parameters=gathered,
            unsharded_gradients=held + made,
            activations=activations + kept + hidden,
            logits=logits,
        )
        for activations, held in ((in_flight, 0), (later, s.held(s.looped_blocks)))
        for hidden, made, logits in sizes
    ]
