"""Attention sizes: bytes of what the fused kernel of attention reads and returns.

Mostly that is what the projections make. PyTorch's function wants more: values as wide as keys,
and beside a mask keys and values of every query head. What no kernel knows, the reference decoder
writes into queries and keys: ALiBi and sinks are columns more, a sink also a token more.

Source: fsdpplan/trainer/model/attention.py, positions.py; its steps' peaks (tests/ground_truth).
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.spec.model import Model

EXTRA_WIDTH = 8
"""Columns that ALiBi adds to a head, and sinks: kernels take widths that 8 divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTensors:
    """The tensors of one block's attention kernel."""

    query_bytes: int
    key_bytes: int
    value_bytes: int
    attended_bytes: int
    """What it returns, where what is read of it is a copy; 0 where that is all of it."""


def torch_attention_tensors(
    model: Model, *, tokens: int, seq_len: int, tp: int, element_bytes: int, masked: bool
) -> AttentionTensors:
    """Of PyTorch's scaled_dot_product_attention in the reference decoder, for `tokens` tokens in
    sequences of `seq_len`; `masked`: it is given a mask."""
    added = (model.positions == "alibi") + model.attention_sinks
    width = model.head_dim + EXTRA_WIDTH * added
    rows = tokens + model.attention_sinks * (tokens // seq_len)
    a_head = rows * width * element_bytes
    heads = -(-model.heads // tp)
    key_heads = heads if masked or model.latent else -(-model.kv_heads // tp)
    value_width = model.value_dim // model.heads
    is_part = width > value_width or rows > tokens
    return AttentionTensors(
        query_bytes=heads * a_head,
        key_bytes=key_heads * a_head,
        value_bytes=key_heads * a_head,
        attended_bytes=heads * a_head if is_part else 0,
    )
