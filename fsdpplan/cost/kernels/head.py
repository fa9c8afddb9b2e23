"""Head: seconds of output head, loss and embedding on one rank."""

from __future__ import annotations

from functools import lru_cache

from fsdpplan.cost.kernels.alignment import aligned_fraction
from fsdpplan.cost.kernels.products import backward_matmul_seconds, forward_matmul_seconds
from fsdpplan.cost.kernels.work import memory_bytes_per_second
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES, Precision

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
    backward_matmul = backward_matmul_seconds(shapes, dtype=dtype, device=device)
    if not pads:
        share = aligned_fraction(width=vocab, element_bytes=DTYPE_BYTES[dtype], device=device)
        forward_matmul, backward_matmul = forward_matmul / share, backward_matmul / share
    logits = tokens * (loss_vocab or vocab)
    forward_bytes, backward_bytes = JOINED_LOSS_BYTES if joins_loss else EAGER_LOSS_BYTES
    normed = tokens * model.hidden * DTYPE_BYTES[dtype]
    return (
        forward_matmul + (forward_bytes * logits + 2 * normed) / memory,
        backward_matmul + (backward_bytes * logits + 5 * normed) / memory,
    )


@lru_cache(maxsize=4096)
def embedding_seconds(
    *, model: Model, tokens: int, rows: int, element_bytes: int, tied: bool, device: Device
) -> tuple[float, float]:
    """(forward, backward) seconds of the embedding over `rows` of the table.

    Forward reads a row and writes it for each token. Backward fills the table's gradient with
    zeros, reads a gradient and adds it to a row for each token (3); a tied table's two gradients
    are added (3 passes). Learned positions are looked up and added likewise.
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
    return forward / memory, backward / memory
