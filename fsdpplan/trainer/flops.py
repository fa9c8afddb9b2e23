"""Useful FLOPs of one token, for the MFU: recomputation does not count."""

from __future__ import annotations

from .config import ModelConfig


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that multiply each token: the matrices of the blocks and the output head (tied or
    not); the embedding look-up, norms and biases are out."""
    query_dim = model.heads * model.head_dim
    kv_dim = model.kv_heads * model.head_dim
    attention = 2 * model.hidden * query_dim + 2 * model.hidden * kv_dim
    projections = 3 if model.mlp == "swiglu" else 2
    feed_forward = projections * model.hidden * model.ffn_hidden
    return model.layers * (attention + feed_forward) + model.vocab * model.hidden


def flops_per_token(model: ModelConfig, *, seq_len: int) -> int:
    """FLOPs of forward and backward for one token.

        6 * matmul parameters + 6 * layers * seq_len * query_dim

    A weight takes a multiplication and an addition in forward, twice that in backward. Causal
    attention has two matmuls (scores, values) of 2 * seq_len * query_dim each in forward, half of
    which is masked, and twice that in backward: 3 * (2 * 2 * seq_len * query_dim / 2).
    """
    query_dim = model.heads * model.head_dim
    return 6 * matmul_parameters(model) + 6 * model.layers * seq_len * query_dim
