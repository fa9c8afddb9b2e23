"""Mixers: what carries tokens to one another in a block but softmax attention over all keys.

Linear attention by the gated delta rule, the state space of Mamba-2, and the indexer of sparse
attention: their parameters, what they multiply beside their weights, and what they keep.

Both kinds of states are computed in chunks of C tokens: matmuls inside a chunk, and a state of
key width x value width a head from chunk to chunk. FLOPs of one head, a token, forward:

    gated delta rule    2 C (3 k + 2 v) + 6 k v + C**2 / 3
    Mamba-2             2 C p + 4 n p, and of each group 2 C n

k, v: width of a key and a value head; n, p: numbers of a state, width of a head. The terms are, of
the delta rule: keys by keys, the two products of the chunk's inverse with keys and values, queries
by keys, these by values; the state read for the values to correct and for the result, and written;
and the inverse by substitution. Of Mamba-2: what reads by what writes, these by inputs; the state
written and read. The decay from chunk to chunk is element-wise.

Nothing here is fitted: no measured run has such blocks, so a plan says that it rests on FLOPs and
bytes alone, and its band is wider.

Source: Yang et al. 2024, arXiv 2412.06464, section 3.3, and 2406.06484, section 3.2 (with the WY
form); Dao and Gu 2024, arXiv 2405.21060, section 6; DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from fsdpplan.cost.model.params import (
    ParameterTensor,
    attention_span_tokens,
    linear,
    norm,
)
from fsdpplan.spec.model import DeltaRule, Indexer, LatentAttention, Mamba2, Model

DELTA_CHUNK = 64
"""Tokens of a chunk of the delta rule. Source: flash-linear-attention
fla/ops/gated_delta_rule/chunk.py; transformers' own function has the same default."""

FP32_BYTES = 4


def mixer_tensors(model: Model) -> list[ParameterTensor]:
    """Parameters of the mixer of a block that has no attention."""
    if model.mixer == "D":
        assert model.delta
        return _delta_rule(model.hidden, model.delta)
    assert model.mamba
    return _mamba2(model.hidden, model.mamba)


def _delta_rule(hidden: int, delta: DeltaRule) -> list[ParameterTensor]:
    """Projections to queries, keys, values and gate, and to two numbers a head, a convolution over
    the first three, and the way out.

    Source: transformers 5, models/qwen3_next/modeling_qwen3_next.py, `Qwen3NextGatedDeltaNet`.
    """
    heads, mixed = delta.value_heads, 2 * delta.key_dim + delta.value_dim
    rows = mixed + delta.value_dim
    tensors = linear("wqkvz", rows, hidden, role="query", bias=False, split="rows")
    tensors += linear(
        "wba", 2 * heads, hidden, role="key", bias=False, split="rows", stacks_on="wqkvz"
    )
    tensors += _convolution(mixed, delta.convolution, bias=False)
    tensors += _of_heads(heads, "dt_bias", "A_log")
    tensors += norm("mixer_norm", delta.value_head_dim, bias=False)
    return tensors + linear(
        "wo", hidden, delta.value_dim, role="output", bias=False, split="columns"
    )


def _mamba2(hidden: int, mamba: Mamba2) -> list[ParameterTensor]:
    """One projection to gate, inputs, what writes to and reads of the states, and steps.

    Source: transformers 5, models/nemotron_h/modeling_nemotron_h.py, `NemotronHMamba2Mixer`.
    """
    mixed = mamba.inner_dim + 2 * mamba.group_dim
    rows = mamba.inner_dim + mixed + mamba.heads
    bias = mamba.bias
    tensors = linear("w_in", rows, hidden, role="query", bias=bias, split="rows")
    tensors += _convolution(mixed, mamba.convolution, bias=mamba.convolution_bias)
    tensors += _of_heads(mamba.heads, "dt_bias", "A_log", "D")
    tensors += norm("mixer_norm", mamba.inner_dim, bias=False, split="rows")
    return tensors + linear(
        "wo", hidden, mamba.inner_dim, role="output", bias=bias, split="columns"
    )


def _convolution(channels: int, width: int, *, bias: bool) -> list[ParameterTensor]:
    """Each channel over the last `width` tokens by itself: no product of matrices."""
    shape = (channels, 1, width)
    tensors = [ParameterTensor(name="conv.weight", shape=shape, split="rows")]
    if bias:
        tensors.append(ParameterTensor(name="conv.bias", shape=(channels,), split="rows"))
    return tensors


def _of_heads(heads: int, *names: str) -> list[ParameterTensor]:
    """A number a head."""
    return [ParameterTensor(name=name, shape=(heads,), split="rows") for name in names]


def indexer_tensors(
    hidden: int, latent: LatentAttention, indexer: Indexer
) -> list[ParameterTensor]:
    """Queries of all its heads, one key, and a weight for each head; whole on each
    tensor-parallel rank.

    Source: transformers 5, models/deepseek_v32/modeling_deepseek_v32.py, `DeepseekV32Indexer`.
    """

    def whole(name: str, rows: int, columns: int) -> list[ParameterTensor]:
        return linear(f"indexer.{name}", rows, columns, role="indexer", bias=False, split="none")

    width = indexer.head_dim
    tensors = whole("queries", indexer.heads * width, latent.query_rank)
    tensors += whole("keys", width, hidden)
    tensors += norm("indexer.norm", width, bias=True)
    return tensors + whole("weights", indexer.heads, hidden)


def indexer_flops_per_token(model: Model, *, seq_len: int, document_tokens: float = inf) -> float:
    """Each query of the indexer by all keys before it; their weighted sum is element-wise."""
    indexer = model.latent.indexer if model.latent else None
    if indexer is None:
        return 0.0
    span = attention_span_tokens(seq_len=seq_len, document_tokens=document_tokens)
    return 2.0 * span * indexer.heads * indexer.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of one block, and what its kernel reads and writes, in elements."""

    heads: int
    """States of a sequence."""
    key_heads: int
    """Heads of what writes to states and of what reads of them."""
    key_width: int
    value_width: int
    chunk: int
    flops: float
    """Of all heads, a token, forward."""
    traffic: float
    """Elements a token that its kernels read and write, forward."""
    inverse: int = 0
    """Elements a token of the inverse of each chunk, which backward reads."""
    mixed_dim: int
    """Channels of the convolution before it."""
    projected_dim: int
    """What the projection in makes, the numbers of heads apart."""

    @property
    def key_dim(self) -> int:
        """Width of all that writes to states; of all that reads of them likewise."""
        return self.key_heads * self.key_width

    @property
    def value_dim(self) -> int:
        """Width of all inputs; of all results likewise."""
        return self.heads * self.value_width


@lru_cache(maxsize=256)
def state_of(model: Model) -> State | None:
    """The state of a block that mixes tokens by one; None: it has none."""
    if model.mixer == "D":
        assert model.delta
        return _delta_state(model.delta)
    if model.mixer == "M":
        assert model.mamba
        return _mamba_state(model.mamba)
    return None


def mixer_state(model: Model) -> State:
    """The state of a block that has one."""
    state = state_of(model)
    assert state is not None, model.mixer
    return state


def _delta_state(delta: DeltaRule) -> State:
    """Its kernels: the inverse of each chunk, what it makes of keys and values, the states with the
    corrected values, and the results. Source: flash-linear-attention, as above."""
    c, k, v = DELTA_CHUNK, delta.key_head_dim, delta.value_head_dim
    a_head = 2.0 * c * (3 * k + 2 * v) + 6.0 * k * v + c * c / 3
    inverse, states = delta.value_heads * c, states_dim(delta.value_heads, k, v, c)
    of_keys = 4 * delta.key_dim + 2 * delta.value_heads * k
    return State(
        heads=delta.value_heads,
        key_heads=delta.key_heads,
        key_width=k,
        value_width=v,
        chunk=c,
        flops=delta.value_heads * a_head,
        traffic=of_keys + 6 * delta.value_dim + 2 * states + 2 * inverse,
        inverse=inverse,
        mixed_dim=2 * delta.key_dim + delta.value_dim,
        projected_dim=2 * (delta.key_dim + delta.value_dim),
    )


def _mamba_state(mamba: Mamba2) -> State:
    """Its kernels: states of chunks, these passed on, what reads by what writes, and the results.
    Source: state-spaces/mamba mamba_ssm/ops/triton/ssd_combined.py."""
    c, n, p = mamba.chunk, mamba.state, mamba.head_dim
    flops = mamba.groups * 2.0 * c * n + mamba.heads * (2.0 * c * p + 4.0 * n * p)
    states = states_dim(mamba.heads, n, p, c)
    return State(
        heads=mamba.heads,
        key_heads=mamba.groups,
        key_width=n,
        value_width=p,
        chunk=c,
        flops=flops,
        traffic=4 * mamba.group_dim + 3 * mamba.inner_dim + 4 * states + 2 * mamba.groups * c,
        mixed_dim=mamba.inner_dim + 2 * mamba.group_dim,
        projected_dim=2 * (mamba.inner_dim + mamba.group_dim),
    )


def states_dim(heads: int, key_width: int, value_width: int, chunk: int) -> float:
    """Elements a token of the states between chunks."""
    return heads * key_width * value_width / chunk


def state_flops_per_token(model: Model) -> float:
    """FLOPs of the states of one block's forward, a token; none without."""
    state = state_of(model)
    return state.flops if state else 0.0
