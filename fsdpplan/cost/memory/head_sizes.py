"""Head sizes: the logits, what the loss makes of them, and what the last stage keeps.

PyTorch's cross-entropy has three fp32 tensors at its highest, in backward: log-probabilities and
two gradients; torch's `loss_parallel` makes one gradient more. Megatron's works in place on one
fp32 copy; nanotron's on a second one beside the first; a fused kernel makes the gradient, in the
compute dtype, from the logits as they are.

Sources: traced under fake tensors (tests/ground_truth); Megatron-LM
megatron/core/tensor_parallel/cross_entropy.py; nanotron
src/nanotron/parallel/tensor_parallel/functional.py; flash-attn flash_attn/losses/cross_entropy.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.kernels.head import LossPieces, loss_pieces
from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.cost.model.formats import formats, local_tokens
from fsdpplan.cost.model.shards import Stage
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Sizes of head and loss on one rank; all 0 without a head."""

    last_residual_bytes: int
    """Input of the final norm."""
    last_normed_bytes: int
    """Input of the head."""
    logits_elements: int
    """Logits on this rank."""
    gather_bytes: int
    """Further logits while tensor-parallel ranks gather them for the loss."""
    loss_element_bytes: int
    """All tensors of the loss, for one of the logits, at its highest."""
    kept_bytes: int
    """What a forward pass leaves for its backward pass."""
    weight_elements: int
    """The head's weight."""
    pieces: LossPieces | None
    """Of a loss that is made in pieces."""


def head_sizes(case: Case, stage: Stage) -> HeadSizes:
    """Sizes of head and loss."""
    model, training, layout = case.model, case.training, case.layout
    of = formats(training=training, layout=layout)
    head = int(stage.has_head)
    tokens = local_tokens(training=training, layout=layout)
    residual_tokens = -(-tokens // layout.tp) if layout.sequence_parallel else tokens
    local_vocab = model.vocab_rows(layout.tp) // layout.tp
    logits = head * tokens * (local_vocab if layout.loss_parallel else local_vocab * layout.tp)
    last_residual = head * residual_tokens * model.hidden * of.residual
    last_normed = head * tokens * model.hidden * of.computed
    gathers = layout.tp > 1 and not layout.loss_parallel
    # ranks gather the logits, then join them side by side
    gathered = head * tokens * (layout.tp + 1) * local_vocab * of.computed if gathers else 0
    loss = _loss_bytes(training=training, layout=layout, element_bytes=of.computed)
    pieces = loss_pieces(case, stage)
    kept = last_normed + logits * loss.kept
    if pieces is not None:
        kept = pieces.hidden + pieces.weight_gradient + (last_normed if layout.tp == 1 else 0)
    return HeadSizes(
        last_residual_bytes=last_residual,
        last_normed_bytes=last_normed,
        logits_elements=logits,
        gather_bytes=gathered,
        loss_element_bytes=loss.peak,
        kept_bytes=last_residual + kept,
        weight_elements=head * local_vocab * model.hidden,
        pieces=pieces,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossBytes:
    """Of one of the logits."""

    peak: int
    kept: int


def _loss_bytes(*, training: Training, layout: Layout, element_bytes: int) -> _LossBytes:
    copies = training.traits.fp32_logits
    match copies:
        case 0:
            return _LossBytes(peak=2 * element_bytes, kept=element_bytes)
        case 1 | 2:
            # the first copy is made beside the logits, and its gradient is cast back to theirs
            cast = element_bytes if element_bytes < FP32_BYTES else 0
            peak = max(FP32_BYTES + cast, copies * FP32_BYTES)
            return _LossBytes(peak=peak, kept=FP32_BYTES)
        case _:
            one_more = int(layout.tp > 1 and layout.loss_parallel)
            peak = FP32_BYTES * (copies + one_more)
            return _LossBytes(peak=peak, kept=FP32_BYTES + element_bytes)
