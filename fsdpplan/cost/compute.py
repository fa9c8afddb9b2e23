"""Compute: seconds of one block, of the head and loss, and of the optimizer on one rank.

    block = max(matmuls + attention + element-wise traffic, operators * launch)

Matmuls by shape, attention by its causal FLOPs at its own efficiency, element-wise work by bytes
over the memory bandwidth (fused where the block is compiled), and a floor for small shapes: an
eager program cannot start operators faster than the host dispatches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.flops import attention_forward_flops_per_token
from fsdpplan.cost.matmul import matmul_seconds
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES, Precision

ATTENTION_BACKWARD_FLOPS_RATIO = 2.5
"""Fused attention recomputes the scores: five matmuls in backward (scores, and the gradients of
values, probabilities, queries and keys) against two in forward."""

ADAMW_BYTES_PER_PARAMETER = 28
"""Fused AdamW reads parameter, gradient and two moments and writes all but the gradient, fp32."""

CLIP_BYTES_PER_PARAMETER = 12
"""The norm reads the fp32 gradients; clipping reads and writes them."""

COMPILED_OPERATOR_FRACTION = 12 / 32
"""Share of an eager block's operators that remain when the block is compiled: seven matmuls and
attention stay, the element-wise work fuses to about four chains. Reasoned, not measured on CUDA."""


def memory_bytes_per_second(device: Device) -> float:
    """What element-wise kernels reach of the memory bandwidth."""
    return device.memory_bandwidth_bytes_per_second * device.fit.memory_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of one block for one micro-batch on one rank."""

    forward: float
    recompute: float
    """Forward work done again in backward by activation checkpointing."""
    backward: float
    """Without the recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What a block's shape comes down to; the key under which its time is remembered."""

    model: Model
    tokens: int
    """Tokens of a micro-batch on a rank, before sequence parallelism."""
    seq_len: int
    """Length that attention sees."""
    tp: int
    sequence_parallel: bool
    precision: Precision
    mode: ActivationCheckpointing
    compiled: bool
    autocast: bool
    """Weights are cast in each forward."""
    residual_bytes: int
    """One element of the residual stream: 4 where plain autocast leaves it in fp32."""
    wrapper_operators: float
    """What the data-parallel wrapper dispatches on the host for this block, in operators."""


def projection_shapes(work: BlockWork) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of the matmuls of one block's forward on one rank, in order."""
    model, tokens, tp = work.model, work.tokens, work.tp
    query = -(-model.query_dim // tp)
    key = -(-model.kv_dim // tp)
    inner = -(-model.ffn_hidden // tp)
    attention = (
        (tokens, query, model.hidden),
        (tokens, key, model.hidden),
        (tokens, key, model.hidden),
        (tokens, model.hidden, query),
    )
    up = (tokens, inner, model.hidden)
    ups = (up, up) if model.mlp == "swiglu" else (up,)
    return (*attention, *ups, (tokens, model.hidden, inner))


def forward_matmul_seconds(
    shapes: tuple[tuple[int, int, int], ...], *, dtype: str, device: Device
) -> float:
    """Seconds of the products in `shapes`, at the sustained rate."""
    seconds = sum(matmul_seconds(m=m, n=n, k=k, dtype=dtype, device=device) for m, n, k in shapes)
    return seconds / device.fit.sustained_fraction


def backward_matmul_seconds(
    shapes: tuple[tuple[int, int, int], ...], *, dtype: str, device: Device
) -> float:
    """Seconds of the two products behind each forward one: by input and by weight."""
    by_input = tuple((m, k, n) for m, n, k in shapes)
    by_weight = tuple((k, n, m) for m, n, k in shapes)
    return forward_matmul_seconds(by_input + by_weight, dtype=dtype, device=device)


def attention_forward_seconds(work: BlockWork, device: Device) -> float:
    """Fused causal attention of one block's forward on one rank."""
    flops = work.tokens * attention_forward_flops_per_token(model=work.model, seq_len=work.seq_len)
    peak = device.peak_flops_per_second(work.precision)
    fit = device.fit
    return flops / work.tp / (peak * fit.attention_forward_fraction * fit.sustained_fraction)


def attention_backward_seconds(work: BlockWork, device: Device) -> float:
    """The same in backward, with its recomputation of the scores."""
    fit = device.fit
    ratio = fit.attention_forward_fraction / fit.attention_backward_fraction
    return attention_forward_seconds(work, device) * ATTENTION_BACKWARD_FLOPS_RATIO * ratio


def element_wise_bytes(work: BlockWork) -> tuple[float, float]:
    """Memory traffic of a block's element-wise work in (forward, backward), in bytes.

    Eager, forward: two norms and two residual additions on the residual stream (10 passes over
    it), rotations (9 passes over queries and keys: four products, two sums, one concatenation),
    gate (5 passes over the inner width; GELU 2). Backward: 21, 9 and 9 (GELU 3). Compiled: each
    chain reads its inputs and writes its results once: 8, 2 and 3 (2), and 12, 2 and 5 (3).
    Counted from the operators of the reference block.
    """
    model = work.model
    element_bytes = DTYPE_BYTES[work.precision]
    residual_tokens = work.tokens / work.tp if work.sequence_parallel else work.tokens
    residual = residual_tokens * model.hidden * work.residual_bytes
    rotated = work.tokens * (model.query_dim + model.kv_dim) / work.tp * element_bytes
    if model.positions != "rope":
        rotated = 0.0
    inner = work.tokens * model.ffn_hidden / work.tp * element_bytes
    gated = model.mlp == "swiglu"
    if work.compiled:
        forward = 8 * residual + 2 * rotated + (3 if gated else 2) * inner
        backward = 12 * residual + 2 * rotated + (5 if gated else 3) * inner
    else:
        forward = 10 * residual + 9 * rotated + (5 if gated else 2) * inner
        backward = 21 * residual + 9 * rotated + (9 if gated else 3) * inner
    return forward, backward


def operators(work: BlockWork) -> tuple[float, float]:
    """Operators that the host dispatches for a block in (forward, backward).

    The reference block in eager mode: two norms, two additions, the projections, attention, nine
    for each rotation and two (SwiGLU) or one for the activation. Backward runs about twice as
    many. Autocast adds a cast for each weight.
    """
    model = work.model
    projections = len(projection_shapes(work))
    forward = 5.0 + projections + (2 if model.mlp == "swiglu" else 1)
    if model.positions == "rope":
        forward += 18
    if work.autocast:
        forward += projections
    if work.compiled:
        forward *= COMPILED_OPERATOR_FRACTION
    return forward + work.wrapper_operators, 2 * forward + work.wrapper_operators


@lru_cache(maxsize=8192)
def block_seconds(work: BlockWork, device: Device) -> BlockSeconds:
    """Seconds of one block for one micro-batch on one rank, communication apart."""
    dtype = work.precision
    memory = memory_bytes_per_second(device)
    launch = device.fit.kernel_launch_seconds
    shapes = projection_shapes(work)
    forward_bytes, backward_bytes = element_wise_bytes(work)
    forward_operators, backward_operators = operators(work)
    attention = attention_forward_seconds(work, device)
    matmuls = forward_matmul_seconds(shapes, dtype=dtype, device=device)
    casts = _cast_seconds(work, memory)
    forward = max(matmuls + attention + forward_bytes / memory + casts, forward_operators * launch)
    backward = max(
        backward_matmul_seconds(shapes, dtype=dtype, device=device)
        + attention_backward_seconds(work, device)
        + backward_bytes / memory
        + casts,
        backward_operators * launch,
    )
    return BlockSeconds(
        forward=forward,
        recompute=_recompute_seconds(
            work, device, forward=forward, attention=attention, element_wise=forward_bytes / memory
        ),
        backward=backward,
    )


def _cast_seconds(work: BlockWork, memory_bytes_per_second: float) -> float:
    """Autocast copies each fp32 weight to the compute dtype in forward, and its gradient back."""
    if not work.autocast or work.precision == "fp32":
        return 0.0
    weights = sum(n * k for _, n, k in projection_shapes(work))
    return weights * (4 + DTYPE_BYTES[work.precision]) / memory_bytes_per_second


def _recompute_seconds(
    work: BlockWork, device: Device, *, forward: float, attention: float, element_wise: float
) -> float:
    """Forward work that backward repeats, by mode.

    full: all but the last product, which nothing in backward needs; op: every second product and
    the element-wise work; attention: the fused attention kernel.
    """
    shapes = projection_shapes(work)
    match work.mode:
        case "none":
            return 0.0
        case "attention":
            return attention
        case "op":
            again = forward_matmul_seconds(shapes[1::2], dtype=work.precision, device=device)
            return again + element_wise
        case "full":
            last = forward_matmul_seconds(shapes[-1:], dtype=work.precision, device=device)
            return max(0.0, forward - last)


@lru_cache(maxsize=8192)
def head_seconds(
    *, model: Model, tokens: int, vocab: int, precision: Precision, device: Device
) -> tuple[float, float]:
    """(forward, backward) seconds of head and fp32 cross-entropy over `vocab` local columns.

    Element-wise bytes a logit: forward 2 + 4 (copy to fp32) + 4 + 4 (log-softmax); backward
    4 (zeros) + 4 + 4 + 4 (log-softmax) + 4 + 2 (copy back).
    """
    memory = memory_bytes_per_second(device)
    logits = tokens * vocab
    shapes = ((tokens, vocab, model.hidden),)
    forward = forward_matmul_seconds(shapes, dtype=precision, device=device)
    backward = backward_matmul_seconds(shapes, dtype=precision, device=device)
    table_bytes = 2 * 2 * vocab * model.hidden  # the table's gradient: zeros, then additions
    return forward + 14 * logits / memory, backward + (22 * logits + table_bytes) / memory


def optimizer_seconds(*, local_parameters: int, device: Device, tensors: int) -> float:
    """Gradient norm, clipping and fused AdamW over a rank's own fp32 parameters, by bytes.

    A few kernels a hundred tensors are launched; one a tensor is the upper bound for the norm.
    """
    memory = memory_bytes_per_second(device)
    traffic = (ADAMW_BYTES_PER_PARAMETER + CLIP_BYTES_PER_PARAMETER) * local_parameters
    return max(traffic / memory, tensors * device.fit.kernel_launch_seconds)
