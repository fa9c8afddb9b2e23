"""Sizes: bytes of the tensors of one block on one rank, for one micro-batch, that several of its
operators read or make.

`tokens` is micro_batch * seq_len / cp; tensor parallelism divides heads and inner widths, sequence
parallelism the residual stream too.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.attention_kernel import added_width
from fsdpplan.cost.model.formats import FP32_BYTES


class HeadSizes(NamedTuple):
    """What attention, or a state in its place, works on; all 0 where nothing mixes tokens."""

    query: int = 0
    """tokens * heads * head_dim / tp."""
    key: int = 0
    """tokens * kv_heads * head_dim / tp; of every query head under latent attention."""
    value: int = 0
    """As `key`; of its own width under latent attention."""
    attended: int = 0
    """What attention returns and the output projection reads."""
    query_read: int = 0
    """Queries as the kernel of attention reads them."""
    key_read: int = 0
    value_read: int = 0
    attended_read: int = 0
    """What the kernel returns, where what is read of it is a copy; 0 where it is `attended`."""
    scores: int = 0
    """One score matrix: heads/tp * tokens * seq_len; 0 where attention keeps none."""
    scores_kept: int = 0
    """Probabilities; with dropout also the mask and what it left."""
    exchanged: int = 0
    """Keys and values of other ranks that context parallelism holds at once, or what it sends and
    gets where heads are traded."""
    states: int = 0
    """States between chunks, which backward makes again with their gradients."""

    @property
    def read(self) -> int:
        """Queries, keys and values as the kernel reads them."""
        return self.query_read + self.key_read + self.value_read

    @property
    def returned(self) -> int:
        """What the kernel returns."""
        return self.attended_read or self.attended


class RoutedSizes(NamedTuple):
    """Tensors of the routed experts: those of `tokens * active` rows, the average over ranks: a
    router out of balance needs more."""

    router: int = 0
    """fp32 logits and probabilities of all experts."""
    rows: int = 0
    """Rows of hidden width: what the experts read, and as much that they return."""
    returned_kept: int = 0
    """What they return, where it is kept to be weighted."""
    inner: int = 0
    """Rows of the experts' inner width."""
    router_input: int = 0
    """An fp32 copy of what the router reads; 0 where it reads that itself."""
    exchanged: int = 0
    """Rows that an all-to-all between the ranks of the experts sends or receives."""


class BlockSizes(NamedTuple):
    """Bytes of the tensors of one block."""

    residual: int
    """The block's input in the dtype of the residual stream: tokens * hidden."""
    normed: int
    """Input of the projections, gathered over the sequence: tokens * hidden."""
    normed_kept: int
    """The same as matmuls keep it: half of it in fp8, the rank's part where they gather again."""
    normed_gradient: int
    """Gradient of the norm's output: as large as `normed`, but fp32 under autocast."""
    residual_cast: int
    """The gradient of the residual stream, cast by autocast or gathered over the sequence for the
    matmuls; 0 where it serves as it is."""
    scatter_copy: int
    """What a reduce-scatter over the sequence lays out before; 0 without sequence parallelism."""
    gather_copy: int
    """What an all-gather over the sequence receives before it lays that out by sequences; 0 where
    there is one sequence, or another order of dimensions."""
    gather_buffer: int
    """Where inputs are gathered again; 0 where they are kept gathered."""
    inner: int
    """tokens * ffn_hidden / tp; with experts, of those that every token visits."""
    heads: HeadSizes
    routed: RoutedSizes


@lru_cache(maxsize=8192)
def block_sizes(work: BlockWork) -> BlockSizes:
    """Sizes of the tensors of one block.

    A residual stream wider than the compute dtype is that of plain CUDA autocast: norms and the
    sums of the stream are fp32, each matmul casts its input. The reference decoder casts its
    embedding and keeps its norms out of autocast instead.
    """
    model, tokens, each = work.model, work.tokens, work.element_bytes
    splits, gathers = work.sequence_parallel, work.gathers_again
    normed = tokens * model.hidden * each
    kept = normed // each if work.fp8_inputs else normed
    inner = 0
    if model.has_network:
        width = model.experts.shared_hidden if model.experts else model.ffn_hidden
        inner = tokens * -(-width // work.tp) * each
    return BlockSizes(
        residual=work.residual_tokens * model.hidden * work.residual_bytes,
        normed=normed,
        normed_kept=-(-kept // work.tp) if gathers and splits else kept,
        normed_gradient=normed * (work.residual_bytes // each),
        residual_cast=normed if work.residual_bytes > each or splits else 0,
        scatter_copy=normed if splits else 0,
        gather_copy=normed if splits and not gathers and tokens > work.rank_seq_len else 0,
        gather_buffer=normed if gathers and splits else 0,
        inner=inner,
        heads=_head_sizes(work),
        routed=_routed_sizes(work),
    )


def _head_sizes(work: BlockWork) -> HeadSizes:
    model, tokens, tp, each = work.model, work.tokens, work.tp, work.element_bytes
    if model.mixer == "-":
        return HeadSizes()
    if model.mixer != "A":
        from fsdpplan.cost.model.mixers import mixer_state  # of few models

        state = mixer_state(model)
        keys, values = (tokens * each * -(-dim // tp) for dim in (state.key_dim, state.value_dim))
        numbers = state.heads * state.key_width * state.value_width * tokens // state.chunk
        own = {"query": keys, "key": keys, "value": values, "attended": values}
        read = {"query_read": keys, "key_read": keys, "value_read": values}
        return HeadSizes(**own, **read, states=numbers * each // tp)
    heads, kv_heads = -(-model.heads // tp), -(-model.kv_heads // tp)
    query = tokens * heads * model.head_dim * each
    key = query if model.latent else tokens * kv_heads * model.head_dim * each
    attended = tokens * -(-model.value_dim // tp) * each
    value = attended if model.latent else key
    scores = 0 if work.flash_attention else tokens * (work.rank_seq_len * work.cp) * heads
    of = HeadSizes(
        query=query,
        key=key,
        value=value,
        attended=attended,
        query_read=query,
        key_read=key,
        value_read=value,
        scores=scores * each,
        scores_kept=scores * (2 * each + 1) if work.dropout else scores * each,
    )
    if work.reference_decoder:
        of = _as_torch_reads(of, work)
    if work.cp == 1:
        return of
    if not work.trades_heads:
        pieces = 2 if work.ring_attention else work.cp
        return of._replace(exchanged=pieces * (key + value))
    # the kernel reads and returns other tensors than the projections make and read
    made = heads if model.latent else kv_heads
    sent, keys = traded_heads(heads, made, cp=work.cp)
    if work.masked and work.reference_decoder:  # of every query head
        made, keys = heads, sent
    of = of._replace(
        query_read=of.query_read // heads * sent,
        key_read=of.key_read // made * keys,
        value_read=of.value_read // made * keys,
        attended_read=attended // heads * sent,
    )
    return of._replace(exchanged=2 * of.read)


def traded_heads(heads: int, key_heads: int, *, cp: int) -> tuple[int, int]:
    """(query heads, key heads) that `cp` ranks trade for tokens around attention.

    Keys and values of too few heads are repeated until the ranks divide them, and the g query heads
    of each made up by zeros for its copies to share; or heads are added with their groups, where
    that sends fewer queries:

        copies = cp / gcd(key heads, cp)
        heads = min(key heads * ceil(g / copies) * copies, ceil(key heads / cp) * cp * g)

    Source: fsdpplan/trainer/parallel/context_parallel.py, `shared_heads`.
    """
    group, copies = heads // key_heads, cp // gcd(key_heads, cp)
    repeated = key_heads * -(-group // copies) * copies
    added = -(-key_heads // cp) * cp * group
    return (added, added // group) if added < repeated else (repeated, key_heads * copies)


def _as_torch_reads(of: HeadSizes, work: BlockWork) -> HeadSizes:
    """As PyTorch's scaled_dot_product_attention reads them in the reference decoder.

    Mostly they are what the projections make. The function wants more: values as wide as keys, and
    beside a mask keys and values of every query head. What no kernel knows, the decoder writes into
    queries and keys: ALiBi and sinks are columns more, a sink also a token more.

    Source: fsdpplan/trainer/model/attention.py, positions.py; peaks of its steps
    (tests/ground_truth).
    """
    model = work.model
    width = model.head_dim + added_width(model)
    rows = work.tokens + model.attention_sinks * (work.tokens // work.rank_seq_len)
    a_head = rows * width * work.element_bytes
    heads = -(-model.heads // work.tp)
    key_heads = heads if work.masked or model.latent else -(-model.kv_heads // work.tp)
    pieces = 2 if work.masked and work.one_by_one else 1
    is_part = width > model.value_dim // model.heads or rows > work.tokens or work.one_by_one
    return of._replace(
        query_read=heads * a_head,
        key_read=pieces * key_heads * a_head,
        value_read=pieces * key_heads * a_head,
        attended_read=heads * a_head if is_part else 0,
    )


def _routed_sizes(work: BlockWork) -> RoutedSizes:
    experts = work.model.experts
    if experts is None:
        return RoutedSizes()
    # tensor-parallel ranks split the inner width of every expert, or the tokens
    inner_tp, rows_tp = (1, work.tp) if work.experts_over_tp else (work.tp, 1)
    tokens = -(-work.tokens // rows_tp)
    rows, each = tokens * experts.active, work.element_bytes
    rows_bytes = rows * work.model.hidden * each
    copies = work.reference_decoder and work.kernels == "eager" and each < FP32_BYTES
    return RoutedSizes(
        router=2 * tokens * experts.experts * FP32_BYTES,
        rows=rows_bytes,
        returned_kept=0 if work.fused_kernels else rows_bytes,
        inner=rows * -(-experts.hidden // inner_tp) * each,
        router_input=tokens * work.model.hidden * FP32_BYTES if copies else 0,
        exchanged=rows_bytes if work.exchanges_rows else 0,
    )


def norm_scale(work: BlockWork) -> int:
    """How much wider norms are than what is computed with: in torch 2.13 those of queries and keys
    are fp32 under plain autocast, too (`rms_norm` in its fp32 list; older versions lack it)."""
    return work.residual_bytes // work.element_bytes


def head_norms_kept(work: BlockWork, of: HeadSizes) -> int:
    """What the norms of queries and keys read, and a number a row. Over all heads, of which ranks
    have some each, a norm is several operators: it keeps its input in fp32, and the quotient."""
    model, each = work.model, work.element_bytes
    if not model.qk_norm:
        return 0
    over_all = model.qk_norm_width == "all_heads"
    per_head = -(-model.heads // work.tp) + -(-model.kv_heads // work.tp)
    rows = work.tokens * (2 if over_all else per_head)
    if over_all and work.tp > 1 and work.kernels == "eager":
        return (of.query + of.key) // each * (FP32_BYTES + each) + 2 * rows * FP32_BYTES
    return norm_scale(work) * (of.query + of.key) + rows * FP32_BYTES


class LatentSizes(NamedTuple):
    """What latent attention makes queries, keys and values of; every rank makes it whole."""

    query: int = 0
    """0 where queries are made of the block's input."""
    key_value: int = 0
    """With the part of keys that all heads share."""
    key_value_normed: int = 0
    """Without it."""
    made: int = 0
    """Keys and values together, without the shared part."""

    @property
    def kept(self) -> int:
        """The norms keep what they read and what they return."""
        return 2 * self.query + self.key_value + self.key_value_normed


def latent_sizes(work: BlockWork, of: HeadSizes) -> LatentSizes:
    """Sizes of the latents; none without."""
    latent = work.model.latent
    if latent is None or work.model.mixer != "A":
        return LatentSizes()
    each = work.tokens * work.element_bytes
    return LatentSizes(
        query=each * latent.query_rank,
        key_value=each * (latent.kv_rank + latent.rope_head_dim),
        key_value_normed=each * latent.kv_rank,
        made=of.key + of.value - each * -(-work.model.heads // work.tp) * latent.rope_head_dim,
    )
