"""Block sizes: bytes of the distinct tensors of one block on one rank, for one micro-batch.

Everything that the memory of a block is made of: `activations` adds up what is kept of it and what
backward allocates. `tokens` is micro_batch * seq_len / cp; tensor parallelism divides heads and
inner widths, sequence parallelism the residual stream too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any

from fsdpplan.cost.model.attention_kernel import added_width
from fsdpplan.spec.model import Experts, LatentAttention, Model
from fsdpplan.spec.training import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTensors:
    """The tensors of one block's attention kernel."""

    query_bytes: int
    key_bytes: int
    value_bytes: int
    attended_bytes: int
    """What it returns, where what is read of it is a copy; 0 where that is all of it."""


def torch_attention_tensors(
    model: Model,
    *,
    tokens: int,
    seq_len: int,
    tp: int,
    element_bytes: int,
    masked: bool,
    one_by_one: bool = False,
) -> AttentionTensors:
    """Of PyTorch's scaled_dot_product_attention in the reference decoder, for `tokens` tokens in
    sequences of `seq_len`; `masked`: it is given a mask; `one_by_one`: so are documents given.

    Mostly they are what the projections make. The function wants more: values as wide as keys, and
    beside a mask keys and values of every query head. What no kernel knows, the decoder writes into
    queries and keys: ALiBi and sinks are columns more, a sink also a token more.

    Source: fsdpplan/trainer/model/attention.py, positions.py; peaks of its steps
    (tests/ground_truth).
    """
    width = model.head_dim + added_width(model)
    rows = tokens + model.attention_sinks * (tokens // seq_len)
    a_head = rows * width * element_bytes
    heads = -(-model.heads // tp)
    key_heads = heads if masked or model.latent else -(-model.kv_heads // tp)
    value_width = model.value_dim // model.heads
    is_part = width > value_width or rows > tokens or one_by_one
    pieces = 2 if masked and one_by_one else 1
    return AttentionTensors(
        query_bytes=heads * a_head,
        key_bytes=pieces * key_heads * a_head,
        value_bytes=pieces * key_heads * a_head,
        attended_bytes=heads * a_head if is_part else 0,
    )


FP32_BYTES = DTYPE_BYTES["fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How the kernels of a block are written, as far as it decides what they keep."""

    fused: bool = False
    """Compiled, or written by hand: backward recomputes element-wise results from their inputs."""
    drops_unused: bool = False
    """Compiled: a result that backward does not read is not kept, whatever checkpointing says."""
    flash: bool = True
    """Attention keeps no score matrix."""
    reference_decoder: bool = False
    """The trainer's own blocks, on PyTorch's function of attention (`attention_sizes`)."""
    dropout: bool = False
    """Probabilities and residual branches drop elements: a byte for each, and dropped copies."""
    fp8_inputs: bool = False
    """Matmuls keep their inputs in fp8 for backward."""
    fp8_rows: bool = False
    """Rows of routed experts, gate and up are kept in fp8, too."""
    remakes_latents: bool = False
    """Backward makes again what norms returned, and queries, keys and values of latents."""
    gathers_again: bool = False
    """Under sequence parallelism, matmuls keep the rank's part of their input and gather it again
    in backward, into a buffer that all share."""
    composite_norms: bool = False
    """RMSNorms are several operators, which keep an fp32 copy and what they scale."""
    weighs_inside: bool = False
    """Routed experts are weighted in their activation, so what they return is not kept."""
    remakes_product: bool = False
    """The input of the down projection is not kept: backward makes it of gate and up."""
    ring_attention: bool = False
    """Context parallelism passes keys and values on, piece by piece; else it gathers them."""

    @property
    def drops_branches(self) -> bool:
        """The trainer's own blocks drop elements of their two branches."""
        return self.dropout and self.reference_decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What the sizes of a block's tensors follow from."""

    model: Model
    """With experts: the block has them."""
    tokens: int
    """Of a micro-batch on this rank, before sequence parallelism splits them."""
    seq_len: int
    """The rank's part of a sequence."""
    tp: int = 1
    sequence_parallel: bool = False
    element_bytes: int = 2
    """Of the compute dtype."""
    residual_element_bytes: int = 2
    """Of the residual stream."""
    kernels: Kernels = Kernels()
    cp: int = 1
    trades_heads: bool = False
    """Context-parallel ranks trade heads for tokens around attention."""
    ep: int = 1
    experts_over_tp: bool = False
    masked: bool = False
    """Attention is given a mask: kernels that take one read keys and values of every query head."""
    packed: bool = False
    """Positions are those of documents, other ones in each sequence."""
    one_by_one: bool = False
    """Documents go through attention one after the other, and their outputs are joined; under a
    mask each query's piece has the keys of the window before it beside its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTensors:
    """Tensors of the routed experts: those of `tokens * active` rows, the average over ranks."""

    router_bytes: int = 0
    """fp32 logits and probabilities of all experts."""
    rows_bytes: int = 0
    """Rows of hidden width: what the experts read, and as much that they return."""
    returned_kept_bytes: int = 0
    """What they return, where it is kept to be weighted."""
    inner_bytes: int = 0
    """Rows of the experts' inner width."""
    router_input_bytes: int = 0
    """An fp32 copy of what the router reads; 0 where it reads that itself."""
    exchanged_bytes: int = 0
    """Rows that an all-to-all between the ranks of the experts sends or receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTensors:
    """The distinct tensors of one block on one rank."""

    residual_bytes: int
    """The block's input in the dtype of the residual stream: tokens * hidden."""
    normed_bytes: int
    """Input of the projections, gathered over the sequence: tokens * hidden."""
    normed_kept_bytes: int
    """The same as matmuls keep it: half of it in fp8, the rank's part where they gather again."""
    gather_buffer_bytes: int
    """Where inputs are gathered again; 0 where they are kept gathered."""
    normed_gradient_bytes: int
    """Gradient of the norm's output: as large as `normed`, but fp32 under autocast."""
    residual_cast_bytes: int
    """The gradient of the residual stream, cast by autocast or gathered over the sequence for the
    matmuls; 0 where it serves as it is."""
    scatter_copy_bytes: int
    """What a reduce-scatter over the sequence lays out before; 0 without sequence parallelism."""
    gather_copy_bytes: int
    """What an all-gather over the sequence receives before it lays that out by sequences; 0 where
    there is one sequence, or another order of dimensions."""
    shares_inputs: bool
    """Projections of one input save it once; autocast makes a copy for each."""
    query_bytes: int
    """tokens * heads * head_dim / tp."""
    key_bytes: int
    """tokens * kv_heads * head_dim / tp; of every query head under latent attention."""
    value_bytes: int
    """As `key`; of its own width under latent attention."""
    query_read_bytes: int
    """Queries as the kernel of attention reads them: see `attention_sizes`."""
    key_read_bytes: int
    value_read_bytes: int
    attended_read_bytes: int
    """What the kernel returns, where what is read of it is a copy; 0 where it is `attended`."""
    attended_bytes: int
    """What attention returns and the output projection reads."""
    attended_copy_bytes: int
    """The same again in fp8, where matmuls keep their inputs so."""
    latents_bytes: int
    """Inputs and outputs of the norms between the two halves of latent projections."""
    query_latent_bytes: int
    """What queries are made of under latent attention; 0 where that is the block's input."""
    key_value_latent_bytes: int
    """What keys and values are made of, with the part of keys that all heads share."""
    keys_and_values_bytes: int
    """What is made of that: both together, without the shared part; 0 without latents."""
    inner_bytes: int
    """tokens * ffn_hidden / tp; with experts, of those that every token visits."""
    product_kept_bytes: int
    """Input of the down projection as it keeps it."""
    norm_copies_bytes: int
    """What the block's two norms keep beside their input, where they are several operators."""
    statistics_bytes: int
    """fp32 row statistics of the norms and the log-sum-exp of attention."""
    log_sum_exp_bytes: int
    """Part of `statistics`; 0 where attention keeps its scores."""
    rotary_bytes: int
    """Cosines and sines saved by the two rotations."""
    qk_normed_bytes: int
    """Inputs and statistics of the query and key norms; 0 without them."""
    post_normed_bytes: int
    """Inputs of the norms behind attention and feed-forward; 0 without them."""
    scores_bytes: int
    """One score matrix: heads/tp * tokens * seq_len; 0 where attention keeps none."""
    scores_kept_bytes: int
    """Probabilities; with dropout also the mask and what it left."""
    masks_bytes: int
    """Dropout's masks on the residual branches: a byte an element."""
    exchanged_bytes: int
    """Keys and values of other ranks that context parallelism holds at once, or what it sends and
    gets where heads are traded."""
    routed: RoutedTensors
    halves: int = 2
    """Branches of the block, each with a norm and its input: 1 where it has no network, or nothing
    that mixes tokens."""
    inputs: int = 3
    """Projections that read the first of them."""
    beside_bytes: int = 0
    """Kept beside what attention keeps: of a gate behind it, or around a state in its place."""
    states_bytes: int = 0
    """States between chunks, which backward makes again with their gradients."""


def block_tensors_bytes(shape: BlockShape) -> BlockTensors:
    """Sizes of the tensors of one block."""
    if shape.model.mixer == "A" and shape.model.has_network and not shape.model.attention_gate:
        return _attention_block_bytes(shape)
    return _other_block_bytes(shape)


@lru_cache(maxsize=4096)
def _other_block_bytes(shape: BlockShape) -> BlockTensors:
    """Of a block without attention or without a network, or with a gate behind attention.

    A state reads and keeps what the convolution before it returns; beside that are kept what the
    convolution reads, the inverses of chunks, the gate, and the result before its norm. A gate of
    attention keeps itself, what it multiplies, and but for fused kernels its sigmoid.
    """
    model, tokens, tp, e = shape.model, shape.tokens, shape.tp, shape.element_bytes
    found = _attention_block_bytes(shape)
    if not model.has_network:
        found = replace(found, inner_bytes=0, product_kept_bytes=0, halves=1)
    if model.halves == 1:
        found = replace(
            found,
            statistics_bytes=found.log_sum_exp_bytes
            + (found.statistics_bytes - found.log_sum_exp_bytes) // 2,
            norm_copies_bytes=found.norm_copies_bytes // 2,
            post_normed_bytes=found.post_normed_bytes // 2,
            masks_bytes=found.masks_bytes // 2,
            halves=1,
        )
    if model.mixer == "A":
        if not model.attention_gate:
            return found
        kept = found.attended_bytes * (2 if shape.kernels.fused else 3)
        return replace(found, beside_bytes=kept, inputs=4)
    sizes: dict[str, Any] = dict.fromkeys(_OF_ATTENTION, 0)
    found = replace(
        found, **sizes, statistics_bytes=found.statistics_bytes - found.log_sum_exp_bytes
    )
    if model.mixer == "-":
        return replace(found, log_sum_exp_bytes=0, inputs=0)
    from fsdpplan.cost.model.mixers import state_of  # of few models

    state = state_of(model)
    assert state is not None
    each = tokens * e
    of_keys, of_values = each * -(-state.key_dim // tp), each * -(-state.value_dim // tp)
    beside = each * -(-state.mixed_dim // tp) + 2 * of_values
    beside += (state.inverse * e + 2 * state.heads * FP32_BYTES) * tokens // tp
    states = state.heads * state.key_width * state.value_width * tokens // state.chunk
    return replace(
        found,
        log_sum_exp_bytes=0,
        inputs=2 if model.mixer == "D" else 1,
        query_bytes=of_keys,
        key_bytes=of_keys,
        value_bytes=of_values,
        query_read_bytes=of_keys,
        key_read_bytes=of_keys,
        value_read_bytes=of_values,
        attended_bytes=of_values,
        attended_copy_bytes=of_values // e if shape.kernels.fp8_inputs else 0,
        beside_bytes=beside,
        states_bytes=states * e // tp,
    )


_OF_ATTENTION = (
    "query_bytes",
    "key_bytes",
    "value_bytes",
    "query_read_bytes",
    "key_read_bytes",
    "value_read_bytes",
    "attended_read_bytes",
    "attended_bytes",
    "attended_copy_bytes",
    "latents_bytes",
    "query_latent_bytes",
    "key_value_latent_bytes",
    "keys_and_values_bytes",
    "rotary_bytes",
    "qk_normed_bytes",
    "scores_bytes",
    "scores_kept_bytes",
    "exchanged_bytes",
)


@lru_cache(maxsize=4096)
def _attention_block_bytes(shape: BlockShape) -> BlockTensors:
    """Of a block with attention and a network.

    A residual stream wider than the compute dtype is that of plain CUDA autocast: norms and the
    sums of the stream are fp32, each matmul casts its input. In torch 2.13 the norms of queries and
    keys are fp32, too (`rms_norm` in autocast's fp32 list; older versions lack it there). The
    reference decoder casts its embedding and keeps its norms out of autocast instead.
    """
    model, tokens, tp, e = shape.model, shape.tokens, shape.tp, shape.element_bytes
    kernels = shape.kernels
    autocasts = shape.residual_element_bytes > e
    norm_scale = shape.residual_element_bytes // e
    residual_tokens = -(-tokens // tp) if shape.sequence_parallel else tokens
    heads, kv_heads = -(-model.heads // tp), -(-model.kv_heads // tp)
    query = tokens * heads * model.head_dim * e
    key = query if model.latent else tokens * kv_heads * model.head_dim * e
    attended = tokens * -(-model.value_dim // tp) * e
    value = attended if model.latent else key
    normed = tokens * model.hidden * e
    inner = tokens * -(-_dense_width(model) // tp) * e
    rotary = 2 * (tokens if shape.packed else shape.seq_len) * _rotated_width(model) * e
    has_rotary = model.positions == "rope"
    scores = 0 if kernels.flash else tokens * (shape.seq_len * shape.cp) * heads
    log_sum_exp = tokens * heads * FP32_BYTES if kernels.flash else 0
    read = AttentionTensors(query_bytes=query, key_bytes=key, value_bytes=value, attended_bytes=0)
    if kernels.reference_decoder:
        read = torch_attention_tensors(
            model,
            tokens=tokens,
            seq_len=shape.seq_len,
            tp=tp,
            element_bytes=e,
            masked=shape.masked,
            one_by_one=shape.one_by_one,
        )
    if shape.trades_heads and shape.cp > 1:
        # the kernel reads and returns other tensors than the projections make and read
        copies = 1 if model.latent else shape.cp // gcd(kv_heads, shape.cp)
        read = AttentionTensors(
            query_bytes=read.query_bytes,
            key_bytes=read.key_bytes * copies,
            value_bytes=read.value_bytes * copies,
            attended_bytes=attended,
        )
    return BlockTensors(
        residual_bytes=residual_tokens * model.hidden * shape.residual_element_bytes,
        normed_bytes=normed,
        normed_kept_bytes=_kept_input_bytes(shape, normed=normed),
        gather_buffer_bytes=normed if kernels.gathers_again and shape.sequence_parallel else 0,
        normed_gradient_bytes=normed * norm_scale,
        residual_cast_bytes=normed if autocasts or shape.sequence_parallel else 0,
        scatter_copy_bytes=normed if shape.sequence_parallel else 0,
        gather_copy_bytes=normed
        if shape.sequence_parallel and not kernels.gathers_again and tokens > shape.seq_len
        else 0,
        shares_inputs=not autocasts,
        query_bytes=query,
        key_bytes=key,
        value_bytes=value,
        query_read_bytes=read.query_bytes,
        key_read_bytes=read.key_bytes,
        value_read_bytes=read.value_bytes,
        attended_read_bytes=read.attended_bytes,
        attended_bytes=attended,
        attended_copy_bytes=attended // e if kernels.fp8_inputs else 0,
        latents_bytes=_latent_bytes(model.latent, tokens=tokens, element_bytes=e),
        query_latent_bytes=tokens * model.latent.query_rank * e if model.latent else 0,
        key_value_latent_bytes=tokens * _kv_width(model.latent) * e if model.latent else 0,
        keys_and_values_bytes=key + value - tokens * heads * model.latent.rope_head_dim * e
        if model.latent
        else 0,
        inner_bytes=inner,
        product_kept_bytes=inner // e if kernels.fp8_inputs else inner,
        norm_copies_bytes=_norm_copies_bytes(shape, residual_tokens=residual_tokens),
        statistics_bytes=_norm_statistics_bytes(shape, residual_tokens=residual_tokens)
        + log_sum_exp,
        log_sum_exp_bytes=log_sum_exp,
        rotary_bytes=rotary * (norm_scale if model.qk_norm else 1) if has_rotary else 0,
        qk_normed_bytes=_qk_normed_bytes(shape, of_both=query + key, norm_scale=norm_scale),
        post_normed_bytes=2 * residual_tokens * model.hidden * e if model.post_norms else 0,
        scores_bytes=scores * e,
        scores_kept_bytes=scores * (2 * e + 1) if kernels.dropout else scores * e,
        masks_bytes=2 * residual_tokens * model.hidden if kernels.dropout else 0,
        exchanged_bytes=_exchanged_bytes(shape, of_one=key + value, read=read),
        routed=_routed_tensors(model.experts, shape),
    )


def _kept_input_bytes(shape: BlockShape, *, normed: int) -> int:
    kept = normed // shape.element_bytes if shape.kernels.fp8_inputs else normed
    is_part = shape.kernels.gathers_again and shape.sequence_parallel
    return -(-kept // shape.tp) if is_part else kept


def _dense_width(model: Model) -> int:
    """Inner width of the network that every token visits."""
    return model.experts.shared_hidden if model.experts else model.ffn_hidden


def _rotated_width(model: Model) -> int:
    return model.latent.rope_head_dim if model.latent else model.head_dim


def _norm_copies_bytes(shape: BlockShape, *, residual_tokens: int) -> int:
    """An fp32 copy of the input, and the quotient in the compute dtype before it is scaled.

    Source: torch 2.5 aten/src/ATen/native/layer_norm.cpp, `rms_norm`; counted under fake tensors.
    """
    kernels = shape.kernels
    if not kernels.composite_norms or kernels.fused or shape.model.norm != "rmsnorm":
        return 0
    return 2 * residual_tokens * shape.model.hidden * (FP32_BYTES + shape.element_bytes)


def _norm_statistics_bytes(shape: BlockShape, *, residual_tokens: int) -> int:
    model = shape.model
    norms = 4 if model.post_norms else 2
    return norms * residual_tokens * (2 if model.norm == "layernorm" else 1) * FP32_BYTES


def _qk_normed_bytes(shape: BlockShape, *, of_both: int, norm_scale: int) -> int:
    """What the norms of queries and keys read, and a number a row. Over all heads, of which ranks
    have some each, a norm is several operators: it keeps its input in fp32, and the quotient."""
    model, e = shape.model, shape.element_bytes
    if not model.qk_norm:
        return 0
    over_all = model.qk_norm_width == "all_heads"
    per_head = -(-model.heads // shape.tp) + -(-model.kv_heads // shape.tp)
    rows = shape.tokens * (2 if over_all else per_head)
    if over_all and shape.tp > 1 and not shape.kernels.fused:
        return of_both // e * (FP32_BYTES + e) + 2 * rows * FP32_BYTES
    return norm_scale * of_both + rows * FP32_BYTES


def _latent_bytes(latent: LatentAttention | None, *, tokens: int, element_bytes: int) -> int:
    """Every rank makes the latents whole; the norms keep what they read and what they return."""
    if latent is None:
        return 0
    widths = _kv_width(latent) + latent.kv_rank + 2 * latent.query_rank
    return tokens * widths * element_bytes


def _kv_width(latent: LatentAttention) -> int:
    return latent.kv_rank + latent.rope_head_dim


def _exchanged_bytes(shape: BlockShape, *, of_one: int, read: AttentionTensors) -> int:
    """A ring holds what it computes with and what arrives; a gather all ranks' parts. Where heads
    are traded, what was sent and what has arrived are there beside what the kernel reads.

    Source: Megatron Core's context parallelism in Transformer Engine, `AttnFuncWithCPAndKVP2P`;
    torch 2.13 torch/distributed/tensor/experimental/_context_parallel, `_AllGatherRotater`.
    """
    if shape.cp == 1:
        return 0
    if shape.trades_heads:
        return 2 * (read.query_bytes + read.key_bytes + read.value_bytes)
    return (2 if shape.kernels.ring_attention else shape.cp) * of_one


def _routed_tensors(experts: Experts | None, shape: BlockShape) -> RoutedTensors:
    if experts is None:
        return RoutedTensors()
    # tensor-parallel ranks split the inner width of every expert, or the tokens
    inner_tp, rows_tp = (1, shape.tp) if shape.experts_over_tp else (shape.tp, 1)
    tokens = -(-shape.tokens // rows_tp)
    rows = tokens * experts.active
    hidden_bytes = shape.model.hidden * shape.element_bytes
    kernels = shape.kernels
    copies = kernels.reference_decoder and not kernels.fused and shape.element_bytes < FP32_BYTES
    return RoutedTensors(
        router_bytes=2 * tokens * experts.experts * FP32_BYTES,
        rows_bytes=rows * hidden_bytes,
        returned_kept_bytes=0 if shape.kernels.weighs_inside else rows * hidden_bytes,
        inner_bytes=rows * -(-experts.hidden // inner_tp) * shape.element_bytes,
        router_input_bytes=tokens * shape.model.hidden * FP32_BYTES if copies else 0,
        exchanged_bytes=rows * hidden_bytes if shape.ep > 1 or shape.experts_over_tp else 0,
    )
