"""Head: seconds of output head, loss and embedding on one rank.

Head pieces: sizes and seconds of a loss that has the logits of some tokens at a time.

The trainer computes head and loss piece by piece, and each piece's gradients beside its loss, so
backward computes nothing again: it only scales what there is. The matmuls are those of a whole
loss; what is added is one more reading of the weight's gradient for each piece, and more kernels.

Source: fsdpplan/trainer/model/loss.py, checked under fake tensors (tests/ground_truth).

Head sizes: the logits, what the loss makes of them, and what the last stage keeps.

PyTorch's cross-entropy has three fp32 tensors at its highest, in backward: log-probabilities and
two gradients; torch's `loss_parallel` makes one gradient more. Compiled, it has none: the gradient
is made, in the compute dtype, from the logits as they are. Megatron's works in place on one
fp32 copy; nanotron's on a second one beside the first; a fused kernel makes the gradient, in the
compute dtype, from the logits as they are.

Sources: traced under fake tensors, and code that torch 2.13's compiler writes of the trainer's loss
(tests/ground_truth); peaks of compiled steps on an H100 (tests/golden/bench/train_runs_own.csv);
transformers 5.23 `ForCausalLMLoss` and accelerate 1.15 `convert_outputs_to_fp32`; Megatron-LM
megatron/core/tensor_parallel/cross_entropy.py; nanotron
src/nanotron/parallel/tensor_parallel/functional.py; flash-attn flash_attn/losses/cross_entropy.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.kernels.products import backward_matmul_seconds, forward_matmul_seconds
from fsdpplan.cost.kernels.rates import aligned_fraction, in_family, memory_bytes_per_second
from fsdpplan.cost.model.formats import (
    FP32_BYTES,
    formats,
    joins_loss,
    local_tokens,
    sums_in_reduce_dtype,
)
from fsdpplan.cost.model.params import trains_ends
from fsdpplan.cost.model.shards import Stage
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import DTYPE_BYTES, Precision, Training, program_named

EAGER_LOSS_BYTES = (14, 22)
"""Bytes a logit of 16 bits. Forward: copy to fp32 (2 + 4), log-softmax (4 + 4); backward: zeros
(4), log-softmax (4 + 4 + 4), copy back (4 + 2)."""

JOINED_LOSS_BYTES = (4, 4)
"""The same where the loss is one kernel or compiled: two readings of the logits for maximum and
sum; one reading and one writing of the gradient."""


@lru_cache(maxsize=8192)
def head_seconds(
    *,
    model: Model,
    tokens: int,
    vocab: int,
    precision: Precision,
    device: Device,
    loss_vocab: int | None = None,
    joins_loss: bool = False,
    pads: bool = False,
) -> tuple[float, float]:
    """(forward, backward) seconds of final norm, head and cross-entropy over `vocab` local columns.

    `loss_vocab`: columns that the loss sees on this rank, all of them where ranks gather the logits
    first (None: `vocab`). `joins_loss`: the loss is compiled or one kernel. `pads`: the software
    pads the vocabulary, so that rows are aligned (compiled blocks and a compiled loss leave the
    head alone). The head stays in 16 bits under fp8.
    """
    dtype: Precision = "bf16" if precision == "fp8" else precision
    memory = memory_bytes_per_second(device)
    shapes = ((tokens, vocab, model.hidden),)
    forward_matmul = forward_matmul_seconds(shapes, dtype=dtype, device=device)
    backward_matmul = _backward_matmul_seconds(model, shapes, dtype=dtype, device=device)
    if not pads:
        share = aligned_fraction(vocab, element_bytes=DTYPE_BYTES[dtype], device=device)
        forward_matmul, backward_matmul = forward_matmul / share, backward_matmul / share
    logits = tokens * (loss_vocab or vocab)
    forward_bytes, backward_bytes = JOINED_LOSS_BYTES if joins_loss else EAGER_LOSS_BYTES
    normed = tokens * model.hidden * DTYPE_BYTES[dtype]
    return (
        forward_matmul + (forward_bytes * logits + 2 * normed) / memory,
        backward_matmul + (backward_bytes * logits + 5 * normed) / memory,
    )


def _backward_matmul_seconds(
    model: Model, shapes: tuple[tuple[int, int, int], ...], *, dtype: str, device: Device
) -> float:
    """Both products of the head's backward; of a frozen one that by its input alone."""
    if trains_ends(model):
        return backward_matmul_seconds(shapes, dtype=dtype, device=device)
    by_input = tuple((m, k, n) for m, n, k in shapes)
    return forward_matmul_seconds(by_input, dtype=dtype, device=device)


@lru_cache(maxsize=4096)
def embedding_seconds(
    *, model: Model, tokens: int, rows: int, element_bytes: int, tied: bool, device: Device
) -> tuple[float, float]:
    """(forward, backward) seconds of the embedding over `rows` of the table.

    Forward reads a row and writes it for each token. Backward fills the table's gradient with
    zeros, reads a gradient and adds it to a row for each token (3); a tied table's two gradients
    are added (3 passes). Learned positions are looked up and added likewise. A frozen one has no
    backward.
    """
    memory = memory_bytes_per_second(device)
    stream = tokens * model.hidden * element_bytes
    table = rows * model.hidden * element_bytes
    forward, backward = 2.0 * stream, 3.0 * stream + table
    if model.positions == "learned":
        forward, backward = forward + 3.0 * stream, backward + stream
    if model.embedding_norm:
        forward, backward = forward + 2.0 * stream, backward + 5.0 * stream
    if tied:
        backward += 3.0 * table
    return forward / memory, backward / memory if trains_ends(model) else 0.0


EAGER_PIECE_BYTES = 36
"""Bytes a logit of 16 bits: copy to fp32 (2 + 4), highest (4), difference (4 + 4), exponential
(4 + 4), sum (4), gradient (4 + 2)."""

JOINED_PIECE_BYTES = 8
"""The same compiled: two readings for the highest and the sum, one more, and one writing."""

EAGER_PIECE_KERNELS = 20
"""Kernels of a piece beside its matmuls; most of them on one number a token."""

JOINED_PIECE_KERNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPieces:
    """Bytes on one rank while the loss is made."""

    logits: int
    """A piece's logits, and their copy in fp32."""
    logits_gradient: int
    """A piece's gradient of the logits, in their place."""
    hidden: int
    """Of all pieces: the gradient of the head's input, and that input as tensor-parallel ranks had
    it split, where they did."""
    weight_gradient: int
    """Sum of the pieces' gradients of the head's weight."""
    product: int
    """One piece's, until it is added; 0 where the matmul adds."""
    cast_gradient: int
    """That sum in the reduce dtype, where it is cast before it is added to earlier ones."""

    @property
    def moments(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(bytes of the weight's gradients, bytes of logits) as a piece's loss is made, and as its
        gradient of the weight is."""
        return (
            (self.weight_gradient, self.logits),
            (self.weight_gradient + self.product, self.logits_gradient),
        )


def piece_tokens(*, training: Training, layout: Layout) -> int:
    """Tokens of the largest piece."""
    return -(-local_tokens(training=training, layout=layout) // layout.loss_chunks)


def loss_pieces(case: Case, stage: Stage) -> LossPieces | None:
    """Sizes of the loss of a stage with a head; None of one without, or where it is whole.

    The weight's gradient is summed in the weight's dtype, where that is fp16 in fp32.
    """
    model, training, layout = case.model, case.training, case.layout
    if layout.loss_chunks == 1 or not stage.has_head:
        return None
    of = formats(training=training, layout=layout)
    local_vocab = model.vocab_rows(layout.tp) // layout.tp
    logits = piece_tokens(training=training, layout=layout) * local_vocab
    weights = local_vocab * model.hidden if trains_ends(model) else 0
    summed = FP32_BYTES if training.activation_dtype == "fp16" else of.gathered
    copy = FP32_BYTES if of.computed < FP32_BYTES else 0
    is_cast = layout.sharding == "fsdp" and sums_in_reduce_dtype(training)
    hidden = local_tokens(training=training, layout=layout) * model.hidden * of.computed
    return LossPieces(
        logits=logits * (of.computed + copy),
        logits_gradient=logits * of.computed,
        hidden=hidden + (hidden // layout.tp if layout.tp > 1 else 0),
        weight_gradient=weights * summed,
        product=0 if summed == of.computed else weights * of.computed,
        cast_gradient=weights * of.reduced if is_cast and of.reduced != summed else 0,
    )


@lru_cache(maxsize=8192)
def head_pieces_seconds(
    *,
    model: Model,
    tokens: int,
    vocab: int,
    chunks: int,
    precision: Precision,
    device: Device,
    joins_loss: bool,
    weight_bytes: int,
) -> tuple[float, float]:
    """(forward, backward) seconds of final norm, head and cross-entropy over `vocab` local columns
    in `chunks` pieces.

    `joins_loss`: what is between the matmuls is compiled. `weight_bytes`: of one element of the
    sum of the weight's gradients. Forward has all matmuls; backward scales the two gradients.
    """
    dtype: Precision = "bf16" if precision == "fp8" else precision
    element_bytes = DTYPE_BYTES[dtype]
    memory = memory_bytes_per_second(device)
    shapes = ((-(-tokens // chunks), vocab, model.hidden),)
    matmuls = forward_matmul_seconds(shapes, dtype=dtype, device=device)
    matmuls += _backward_matmul_seconds(model, shapes, dtype=dtype, device=device)
    matmuls /= aligned_fraction(vocab, element_bytes=element_bytes, device=device)
    weights = vocab * model.hidden if trains_ends(model) else 0
    normed = tokens * model.hidden * element_bytes
    bytes_a_logit = JOINED_PIECE_BYTES if joins_loss else EAGER_PIECE_BYTES
    kernels = chunks * (JOINED_PIECE_KERNELS if joins_loss else EAGER_PIECE_KERNELS)
    streamed = bytes_a_logit * tokens * vocab + 2 * normed
    streamed += (chunks - 1) * weights * weight_bytes
    if weight_bytes != element_bytes:  # a piece's product is read, and the sum written, apart
        streamed += (chunks - 1) * weights * (element_bytes + weight_bytes)
    scaled = 2 * (normed + weights * weight_bytes)
    return (
        chunks * matmuls + streamed / memory + kernels * device.fit.matmul_start_seconds,
        (scaled + 5 * normed) / memory,
    )


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
    loss_gradient_element_bytes: int
    """The gradient of one of the logits, as the loss makes it."""
    kept_bytes: int
    """What a forward pass leaves for its backward pass."""
    weight_elements: int
    """The head's weight."""
    unkept_normed_bytes: int
    """Input of the head where its weight, which has no gradient, does not keep it."""
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
    unkept = 0 if trains_ends(model) or pieces is not None else last_normed
    kept = last_normed - unkept + logits * loss.kept
    if pieces is not None:
        kept = pieces.hidden + pieces.weight_gradient + (last_normed if layout.tp == 1 else 0)
    return HeadSizes(
        last_residual_bytes=last_residual,
        last_normed_bytes=last_normed,
        logits_elements=logits,
        gather_bytes=gathered,
        loss_element_bytes=loss.peak,
        loss_gradient_element_bytes=loss.gradient,
        kept_bytes=last_residual + kept,
        weight_elements=head * local_vocab * model.hidden,
        unkept_normed_bytes=unkept,
        pieces=pieces,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossBytes:
    """Of one of the logits."""

    peak: int
    kept: int
    gradient: int = FP32_BYTES


def _loss_bytes(*, training: Training, layout: Layout, element_bytes: int) -> _LossBytes:
    """Bytes at the highest, and what forward leaves for backward.

    The compiler writes no copy in fp32: forward reads the logits and backward makes their gradient
    from them. It cannot where ranks that split the vocabulary sum in between: then it writes two in
    forward, beside the logits, and keeps one. What is held of the logits (a pipeline's outputs, a
    model's that returns them) is beside the loss's own tensors.
    """
    copies = training.traits.fp32_logits
    is_split = layout.tp > 1 and layout.loss_parallel
    held = _held_logit_bytes(training=training, layout=layout, element_bytes=element_bytes)
    match copies:
        case 0:
            return _LossBytes(peak=2 * element_bytes, kept=element_bytes, gradient=element_bytes)
        case 1 | 2:
            # the first copy is made beside the logits, and its gradient is cast back to theirs
            cast = element_bytes if element_bytes < FP32_BYTES else 0
            peak = max(FP32_BYTES + cast, copies * FP32_BYTES)
            return _LossBytes(peak=peak + held, kept=FP32_BYTES)
        case _ if not joins_loss(training=training, layout=layout):
            peak = FP32_BYTES * (copies + is_split)
            return _LossBytes(peak=peak + held, kept=FP32_BYTES + (held or element_bytes))
        case _ if is_split:
            peak = element_bytes + 2 * FP32_BYTES
            return _LossBytes(peak=peak, kept=FP32_BYTES + held, gradient=element_bytes)
        case _:
            return _LossBytes(peak=2 * element_bytes, kept=element_bytes, gradient=element_bytes)


def _held_logit_bytes(*, training: Training, layout: Layout, element_bytes: int) -> int:
    """Of one of the logits, until backward is through, beside what the loss keeps."""
    returned = program_named(training.program).returned_logits
    if returned == "fp32":
        return FP32_BYTES
    is_output = layout.pp > 1 and layout.sharding == "fsdp"  # of a stage of torch's schedules
    return element_bytes if is_output or returned != "none" else 0


def layout_head_seconds(case: Case) -> tuple[float, float]:
    """(forward, backward) seconds of head and loss for one micro-batch on one rank."""
    model, training, layout = case.model, case.training, case.layout
    traits = training.traits
    device = in_family(case.cluster.device, training.family)
    vocab = model.vocab_rows(layout.tp) // layout.tp
    if layout.loss_chunks > 1:
        is_wide = training.activation_dtype == "fp16"
        of = formats(training=training, layout=layout)
        return head_pieces_seconds(
            model=model,
            tokens=local_tokens(training=training, layout=layout),
            vocab=vocab,
            chunks=layout.loss_chunks,
            precision=training.precision,
            device=device,
            joins_loss=joins_loss(training=training, layout=layout) and layout.tp == 1,
            weight_bytes=FP32_BYTES if is_wide else of.gathered,
        )
    return head_seconds(
        model=model,
        tokens=local_tokens(training=training, layout=layout),
        vocab=vocab,
        precision=training.precision,
        device=device,
        loss_vocab=vocab if layout.loss_parallel or traits.fused_loss else vocab * layout.tp,
        joins_loss=joins_loss(training=training, layout=layout),
        pads=traits.pads_vocabulary,
    )


def layout_embedding_seconds(case: Case, *, is_tied_here: bool) -> tuple[float, float]:
    """(forward, backward) seconds of the embedding for one micro-batch on one rank; tied: the head
    is on the same rank and has the same table."""
    model, training, layout = case.model, case.training, case.layout
    return embedding_seconds(
        model=model,
        tokens=local_tokens(training=training, layout=layout),
        # tensor parallelism makes the table's gradient whole on each rank
        rows=model.vocab_rows(layout.tp),
        element_bytes=formats(training=training, layout=layout).residual,
        tied=is_tied_here and model.tied_embeddings,
        device=case.cluster.device,
    )


def ends_seconds(case: Case, stage: Stage) -> tuple[float, float]:
    """(forward, backward) seconds of the embedding, head and loss that a stage has."""
    forward = backward = 0.0
    if stage.has_head:
        head = layout_head_seconds(case)
        forward, backward = forward + head[0], backward + head[1]
    if stage.has_embedding:
        embedding = layout_embedding_seconds(case, is_tied_here=stage.has_head)
        forward, backward = forward + embedding[0], backward + embedding[1]
    return forward, backward
