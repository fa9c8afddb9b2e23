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
from typing import Literal

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
    normed_gradient: int
    """Gradient of the norm's output: as large as `normed`, but fp32 under autocast."""
    residual_cast: int
    """The gradient of the residual stream, cast by autocast or gathered over the sequence for the
    matmuls; 0 where it serves as it is."""
    scatter_copy: int
    """What a reduce-scatter over the sequence lays out before; 0 without sequence parallelism."""
    shares_inputs: bool
    """Projections of one input save it once; autocast makes a copy for each."""
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
    query: int
    key: int
    """The value projection's is as large."""

    @property
    def total(self) -> int:
        """All matrices of the block."""
        return self.down + self.gate + self.up + self.output + self.query + 2 * self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardStep:
    """One operator of a block's backward: it allocates, then frees its inputs."""

    weight_gradient: int = 0
    """Allocated; stays until the block's gradients are reduced."""
    allocated: int = 0
    freed: int = 0


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
    """Unsharded weight gradients that the block's backward leaves."""
    last_weight_gradient_bytes: int
    """The one registered last: FSDP2 still refers to it while it reduces."""


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
    """Sizes of the tensors of one block; `seq_len` is the local sequence.

    A residual stream wider than the compute dtype is that of plain CUDA autocast: norms and the
    sums of the stream are fp32, each matmul casts its input. In torch 2.13 the norms of queries and
    keys are fp32, too (`rms_norm` in autocast's fp32 list; older versions lack it there). The
    reference decoder casts its embedding and keeps its norms out of autocast instead.
    """
    autocasts = residual_element_bytes > element_bytes
    norm_scale = residual_element_bytes // element_bytes
    residual_tokens = -(-tokens // tp) if sequence_parallel else tokens
    statistics_per_norm = 2 if model.norm == "layernorm" else 1
    norm_statistics = 2 * residual_tokens * statistics_per_norm * FP32_BYTES
    heads = -(-model.heads // tp)
    kv_heads = -(-model.kv_heads // tp)
    query = tokens * heads * model.head_dim * element_bytes
    key = tokens * kv_heads * model.head_dim * element_bytes
    qk_statistics = tokens * (heads + kv_heads) * FP32_BYTES
    rotary = 2 * seq_len * model.head_dim * element_bytes
    normed = tokens * model.hidden * element_bytes
    return BlockTensors(
        residual=residual_tokens * model.hidden * residual_element_bytes,
        normed=normed,
        normed_gradient=normed * norm_scale,
        residual_cast=normed if autocasts or sequence_parallel else 0,
        scatter_copy=normed if sequence_parallel else 0,
        shares_inputs=not autocasts,
        query=query,
        key=key,
        inner=tokens * -(-model.ffn_hidden // tp) * element_bytes,
        statistics=norm_statistics + tokens * heads * FP32_BYTES,
        rotary=rotary * (norm_scale if model.qk_norm else 1) if model.positions == "rope" else 0,
        qk_normed=norm_scale * (query + key) + qk_statistics if model.qk_norm else 0,
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
        query=query,
        key=key,
    )


def saved_bytes(*, model: Model, tensors: BlockTensors, mode: ActivationCheckpointing) -> int:
    """Bytes of one block kept from forward to backward.

        none       2 residual + 2 normed + 2 query + 2 key + 4 inner (GELU: 2) + statistics
                   (autocast: 5 normed, GELU: 4)
        attention  as none: beside fused attention, which keeps no scores, Megatron's selective
                   mode frees next to nothing
        op         residual + first, third, fifth and seventh matmul + attention output
        full       residual

    Source: saved tensors of the operators, counted under fake tensors (tests/ground_truth).
    """
    everything = all_saved_bytes(model=model, tensors=tensors)
    match mode:
        case "none" | "attention":
            return everything
        case "op":
            attention_output = tensors.query + tensors.statistics
            projections = tensors.query + tensors.key + tensors.inner
            down = tensors.normed if model.mlp == "swiglu" else 0
            return tensors.residual + attention_output + projections + down
        case "full":
            return tensors.residual


def all_saved_bytes(*, model: Model, tensors: BlockTensors) -> int:
    """Bytes that one block saves without checkpointing."""
    is_gated = model.mlp == "swiglu"
    inner_copies = 4 if is_gated else 2
    inputs = 2 if tensors.shares_inputs else 4 + int(is_gated)
    return (
        2 * tensors.residual
        + inputs * tensors.normed
        + 2 * tensors.query
        + 2 * tensors.key
        + inner_copies * tensors.inner
        + tensors.statistics
        + tensors.rotary
        + tensors.qk_normed
    )


def backward_steps(
    *, model: Model, tensors: BlockTensors, gradients: WeightGradients
) -> list[BackwardStep]:
    """The operators of one block's backward, last operator of forward first.

    Source: the reference block traced under fake tensors (tests/ground_truth). Left out: what the
    CUDA kernel of attention allocates for itself (fp32 sums of the query gradient; under grouped
    queries, key and value gradients of every query head).
    """
    t, w, step = tensors, gradients, BackwardStep
    cast = t.residual_cast
    own_input = 0 if t.shares_inputs else t.normed
    normed = t.normed_gradient
    down = step(weight_gradient=w.down, allocated=t.inner + cast, freed=t.inner + cast)
    gate = step(weight_gradient=w.gate, allocated=normed, freed=t.inner + t.normed)
    activation = step(allocated=t.inner, freed=2 * t.inner)
    sum_of_two = step(allocated=normed, freed=2 * normed)
    if model.mlp == "swiglu":
        product = step(allocated=2 * t.inner, freed=3 * t.inner)
        up = step(weight_gradient=w.up, allocated=normed, freed=t.inner + own_input)
        feed_forward = [down, product, up, activation, gate, sum_of_two]
    else:
        feed_forward = [down, activation, gate]
    local_normed = t.residual if t.scatter_copy else normed
    scatter = step(allocated=t.scatter_copy + t.residual, freed=t.scatter_copy + normed)
    norm_and_sum = [
        *([scatter] if t.scatter_copy else []),
        step(allocated=t.residual, freed=local_normed + t.residual),
        step(allocated=t.residual, freed=2 * t.residual),
    ]
    attention = [
        step(weight_gradient=w.output, allocated=t.query + cast, freed=cast),
        step(allocated=t.query + 2 * t.key, freed=3 * t.query + 2 * t.key),
        step(freed=t.rotary + t.qk_normed),
        step(weight_gradient=w.key, allocated=normed, freed=t.key + own_input),
        step(weight_gradient=w.key, allocated=normed, freed=t.key + own_input),
        sum_of_two,
        step(weight_gradient=w.query, allocated=normed, freed=t.query + t.normed),
        sum_of_two,
    ]
    return [*feed_forward, *norm_and_sum, *attention, *norm_and_sum]


WeightGradientsOf = Literal["kept", "added", "cast", "cast_and_added"]
"""What becomes of a weight's gradient in backward: it stays until its unit is reduced, or is added
at once to what there is. Under autocast it is cast to fp32 first, and the compute-dtype copy of the
weight is freed with the matmul."""


def backward_peak_bytes(steps: list[BackwardStep], *, weight_gradients: WeightGradientsOf) -> int:
    """Highest level in the backward of one block above the level at its start."""
    level = peak = 0
    for step in steps:
        peak = max(peak, level + step.weight_gradient + step.allocated)
        level += step.allocated - step.freed
        match weight_gradients:
            case "kept":
                level += step.weight_gradient
            case "added":
                pass
            case "cast" | "cast_and_added":
                peak = max(peak, level + 2 * step.weight_gradient)
                level += step.weight_gradient * (1 if weight_gradients == "cast" else -1)
    return peak


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
    weight_gradients: WeightGradientsOf,
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
    unused = tensors.normed if mode == "op" and model.mlp == "swiglu" else 0
    recomputing = mode in ("op", "full")
    recomputed_inner = (3 if model.mlp == "swiglu" else 2) * tensors.inner
    steps = backward_steps(model=model, tensors=tensors, gradients=gradients)
    return BlockActivations(
        saved_bytes=saved,
        live_bytes=everything + unused,
        residual_bytes=tensors.residual,
        forward_transient_bytes=(
            recomputed_inner + tensors.residual + tensors.normed_gradient - unused
            if recomputing
            else tensors.residual + tensors.normed + tensors.scatter_copy
        ),
        backward_peak_bytes=backward_peak_bytes(steps, weight_gradients=weight_gradients),
        weight_gradient_bytes=gradients.total if weight_gradients in ("kept", "cast") else 0,
        last_weight_gradient_bytes=0 if model.mlp_bias else gradients.up or gradients.down,
    )
