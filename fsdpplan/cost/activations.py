"""Activations: what one block keeps for backward, and the peaks inside its backward.

Everything is counted for one micro-batch on one rank, operator by operator, for the reference
decoder in eager mode: PyTorch saves the inputs of each matmul, of fused attention, of the norms
and of the element-wise functions. Checked to the byte class against real FSDP2 under fake tensors
in `tests/ground_truth`. Compiled blocks may keep less (they recompute element-wise results), never
more; that saving is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model

FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTensors:
    """Bytes of the distinct tensors of one block on one rank.

    `tokens` below is micro_batch * seq_len / cp, and tensor parallelism divides heads and the
    feed-forward width; sequence parallelism divides the residual stream too.
    """

    residual: int
    """The block's input in the dtype of the residual stream: tokens * hidden."""
    normed: int
    """Input of the projections, gathered over the sequence: tokens * hidden."""
    query: int
    """tokens * heads * head_dim / tp."""
    key: int
    """tokens * kv_heads * head_dim / tp; values are as large."""
    inner: int
    """tokens * ffn_hidden / tp."""
    statistics: int
    """fp32 row statistics of the two norms and the log-sum-exp of attention."""
    rotary: int
    """Cosines and sines saved by the two rotations."""
    qk_normed: int
    """Inputs and statistics of the query and key norms; 0 without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradients:
    """Bytes of the unsharded weight gradients of one block, in the compute dtype."""

    down: int
    gate: int
    up: int
    output: int
    qkv: int

    @property
    def total(self) -> int:
        """All matrices of the block."""
        return self.down + self.gate + self.up + self.output + self.qkv


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """Activation bytes of one block, one micro-batch, one rank."""

    saved_bytes: int
    """Kept from forward to backward."""
    live_bytes: int
    """Kept or recomputed when the block's backward starts."""
    residual_bytes: int
    """The block's input, and the gradient of its output."""
    forward_transient_bytes: int
    """Most that forward needs beyond what it has saved by then."""
    backward_peak_bytes: int
    """Most that backward reaches above the level at its start, weight gradients included."""
    weight_gradient_bytes: int
    """Unsharded weight gradients at the end of the block's backward."""


@lru_cache(maxsize=4096)
def block_tensors_bytes(
    *,
    model: Model,
    tokens: int,
    seq_len: int,
    tp: int,
    sequence_parallel: bool,
    element_bytes: int,
    residual_element_bytes: int,
) -> BlockTensors:
    """Sizes of the tensors of one block; `seq_len` is the local sequence."""
    residual_tokens = -(-tokens // tp) if sequence_parallel else tokens
    statistics_per_norm = 2 if model.norm == "layernorm" else 1
    norm_statistics = 2 * residual_tokens * statistics_per_norm * FP32_BYTES
    heads = -(-model.heads // tp)
    kv_heads = -(-model.kv_heads // tp)
    query = tokens * heads * model.head_dim * element_bytes
    key = tokens * kv_heads * model.head_dim * element_bytes
    qk_statistics = tokens * (heads + kv_heads) * FP32_BYTES
    rotary = 2 * seq_len * model.head_dim * element_bytes
    return BlockTensors(
        residual=residual_tokens * model.hidden * residual_element_bytes,
        normed=tokens * model.hidden * element_bytes,
        query=query,
        key=key,
        inner=tokens * -(-model.ffn_hidden // tp) * element_bytes,
        statistics=norm_statistics + tokens * heads * FP32_BYTES,
        rotary=rotary if model.positions == "rope" else 0,
        qk_normed=query + key + qk_statistics if model.qk_norm else 0,
    )


@lru_cache(maxsize=1024)
def weight_gradient_bytes(*, model: Model, tp: int, element_bytes: int) -> WeightGradients:
    """Unsharded gradients of the matrices of one block on one tensor-parallel rank."""
    feed_forward = model.hidden * -(-model.ffn_hidden // tp) * element_bytes
    query = model.hidden * -(-model.query_dim // tp) * element_bytes
    key = model.hidden * -(-model.kv_dim // tp) * element_bytes
    return WeightGradients(
        down=feed_forward,
        gate=feed_forward,
        up=feed_forward if model.mlp == "swiglu" else 0,
        output=query,
        qkv=query + 2 * key,
    )


def saved_bytes(*, model: Model, tensors: BlockTensors, mode: ActivationCheckpointing) -> int:
    """Bytes of one block kept from forward to backward.

        none       2 residual + 2 normed + 2 query + 2 key + 4 inner (GELU: 2) + statistics
        attention  none, less the log-sum-exp (Megatron's selective, beside fused attention)
        op         residual + first, third, fifth and seventh matmul + attention output
        full       residual

    Source: saved tensors of the operators, counted under fake tensors (tests/ground_truth);
    Korthikanti et al. 2022 (arXiv 2205.05198) section 4 counts the same block without fused
    attention and with dropout.
    """
    everything = all_saved_bytes(model=model, tensors=tensors)
    match mode:
        case "none" | "attention":
            return everything
        case "op":
            attention_output = tensors.query + tensors.statistics
            projections = tensors.query + tensors.key + tensors.inner
            down = tensors.residual if model.mlp == "swiglu" else 0
            return tensors.residual + attention_output + projections + down
        case "full":
            return tensors.residual


def all_saved_bytes(*, model: Model, tensors: BlockTensors) -> int:
    """Bytes that one block saves without checkpointing."""
    inner_copies = 4 if model.mlp == "swiglu" else 2
    return (
        2 * tensors.residual
        + 2 * tensors.normed
        + 2 * tensors.query
        + 2 * tensors.key
        + inner_copies * tensors.inner
        + tensors.statistics
        + tensors.rotary
        + tensors.qk_normed
    )


def backward_peak_bytes(*, model: Model, tensors: BlockTensors, gradients: WeightGradients) -> int:
    """Highest level in the backward of one block above the level at its start.

    Backward frees saved tensors while it allocates gradients. The candidates are, in order: the
    gradients of gate and up; the up projection; the gate projection; attention; the first norm.
    Source: order of operators of the reference block, traced under fake tensors.
    """
    inner, residual, query, key = tensors.inner, tensors.residual, tensors.query, tensors.key
    normed = tensors.normed
    if model.mlp == "swiglu":
        feed_forward: tuple[int, ...] = (
            gradients.down + 2 * inner,
            gradients.down + gradients.up - inner + normed,
            gradients.down + gradients.up + gradients.gate - 3 * inner + 2 * normed,
        )
        inner_freed = 4 * inner
    else:
        feed_forward = (
            gradients.down + inner,
            gradients.down + gradients.gate - inner + normed,
        )
        inner_freed = 2 * inner
    after_feed_forward = (
        gradients.down + gradients.gate + gradients.up - inner_freed - residual - normed
    )
    attention = after_feed_forward + gradients.output + 2 * query + 2 * key
    end = gradients.total - all_saved_bytes(model=model, tensors=tensors) + 3 * residual
    return max(*feed_forward, attention, end)


@lru_cache(maxsize=8192)
def block_activations(
    *,
    model: Model,
    tokens: int,
    seq_len: int,
    tp: int,
    sequence_parallel: bool,
    element_bytes: int,
    residual_element_bytes: int,
    mode: ActivationCheckpointing,
) -> BlockActivations:
    """All activation quantities of one block for one micro-batch on one rank."""
    tensors = block_tensors_bytes(
        model=model,
        tokens=tokens,
        seq_len=seq_len,
        tp=tp,
        sequence_parallel=sequence_parallel,
        element_bytes=element_bytes,
        residual_element_bytes=residual_element_bytes,
    )
    gradients = weight_gradient_bytes(model=model, tp=tp, element_bytes=element_bytes)
    saved = saved_bytes(model=model, tensors=tensors, mode=mode)
    everything = all_saved_bytes(model=model, tensors=tensors)
    unused = tensors.residual if mode == "op" and model.mlp == "swiglu" else 0
    recomputing = mode in ("op", "full")
    return BlockActivations(
        saved_bytes=saved,
        live_bytes=everything + unused,
        residual_bytes=tensors.residual,
        forward_transient_bytes=(
            3 * tensors.inner + 2 * tensors.normed if recomputing else 2 * tensors.residual
        ),
        backward_peak_bytes=backward_peak_bytes(model=model, tensors=tensors, gradients=gradients),
        weight_gradient_bytes=gradients.total,
    )
