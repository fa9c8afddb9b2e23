"""Phases of a DDP rank: the moments of one step at which its memory can be highest.

Checked against the trainer's model under autocast and fake tensors (tests/ground_truth); the
reducer's buckets are added by arithmetic.
"""

from __future__ import annotations

from fsdpplan.cost.activations import FP32_BYTES
from fsdpplan.cost.phases import Phase, RankSizes


def ddp_phases(s: RankSizes) -> list[Phase]:
    """All candidates of a DDP rank; gradients live in the reducer's buckets all the time.

    Autocast copies each matrix to the compute dtype. The copies stay to the end of forward, and to
    backward unless it recomputes. Backward frees them with the saved activations, so the last
    block's is the highest.
    """

    def phase(
        name: str, *, parameters: int, activations: int, gradients: int = 0, extra: int = 0
    ) -> Phase:
        return Phase(
            name=name,
            gradients=s.gradients(0),
            unsharded_parameters=parameters,
            unsharded_gradients=gradients + s.bucket_copy,
            activations=activations,
            temporaries=extra,
        )

    forward = phase(
        "forward",
        parameters=s.blocks * s.copies_block,
        activations=s.saved(s.blocks),
        extra=s.block.forward_transient_bytes,
    )
    backward = phase(
        "backward",
        parameters=s.copies(s.blocks),
        gradients=s.head_gradient,
        activations=s.saved(s.blocks)
        + s.block.live_bytes
        - s.block.saved_bytes
        + s.block.residual_bytes,
        extra=s.block.backward_peak_bytes,
    )
    embedding = phase(
        "backward",
        parameters=0,
        gradients=s.head_gradient + s.embedding_gradient,
        activations=s.block.residual_bytes,
    )
    logits = phase(
        "forward",
        parameters=s.blocks * s.copies_block + s.copies_root,
        activations=s.saved(s.blocks) + 2 * s.last_residual + s.last_normed,
        extra=s.element_bytes * s.logits_elements,
    )
    return [forward, logits, *_ddp_loss_phases(s), backward, embedding]


def _ddp_loss_phases(s: RankSizes) -> list[Phase]:
    """The loss, forward and backward; then the head's backward and the cast of its gradient."""
    recomputes = s.block.live_bytes > s.block.saved_bytes
    copies = 0 if recomputes else s.blocks * s.copies_block
    saved = s.saved(s.blocks) + s.last_residual

    def phase(*, activations: int, logits_bytes: int, parameters: int, gradients: int) -> Phase:
        return Phase(
            name="loss",
            gradients=s.gradients(0),
            unsharded_parameters=copies + parameters,
            unsharded_gradients=gradients,
            activations=saved + activations,
            logits=logits_bytes * s.logits_elements,
        )

    head = s.head_gradient_made
    loss = phase(
        activations=s.last_normed,
        logits_bytes=s.loss_element_bytes,
        parameters=s.copies_root,
        gradients=0,
    )
    backward = phase(
        activations=2 * s.last_normed,
        logits_bytes=s.element_bytes,
        parameters=s.copies_root,
        gradients=head,
    )
    gradient_cast = phase(
        activations=s.last_residual,
        logits_bytes=0,
        parameters=0,
        gradients=3 * head if s.element_bytes < FP32_BYTES else head,
    )
    return [loss, backward, gradient_cast]
