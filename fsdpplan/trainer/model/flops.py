"""Useful FLOPs of one token, for the MFU: recomputation does not count."""

from __future__ import annotations

from math import expm1, inf

from ..config import AdaptersConfig, ModelConfig
from .adapters import target_widths


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that multiply each token: the matrices of the blocks and the output head (tied or
    not), of the routed experts the active ones; the embedding look-up, norms and biases are out."""
    networks = sum(_network_parameters(model, layer) for layer in range(model.layers))
    return model.layers * _attention_parameters(model) + networks + model.vocab * model.hidden


def _attention_parameters(model: ModelConfig) -> int:
    """The projections of one block's attention."""
    query_dim, value_dim = model.heads * model.head_dim, model.heads * model.value_head_dim
    out = value_dim * model.hidden
    latent = model.latent
    if latent is None:
        return out + model.hidden * (query_dim + 2 * model.kv_heads * model.head_dim)
    rank = latent.query_rank
    queries = rank * (model.hidden + query_dim) if rank else model.hidden * query_dim
    into_latent = model.hidden * (latent.kv_rank + latent.rope_head_dim)
    plain_dim = model.heads * (model.head_dim - latent.rope_head_dim)
    return out + queries + into_latent + latent.kv_rank * (plain_dim + value_dim)


def _network_parameters(model: ModelConfig, layer: int) -> int:
    """The matrices that a token meets in block `layer` behind its attention."""
    projections = 2 if model.mlp == "gelu" else 3
    experts = model.experts
    if experts is None or not model.has_experts(layer):
        return projections * model.hidden * model.ffn_hidden
    inner = experts.active * experts.hidden + experts.shared_hidden
    scores = experts.experts + experts.shared_gate
    return projections * model.hidden * inner + scores * model.hidden


def _span_tokens(model: ModelConfig, layer: int, *, seq_len: int, document_tokens: float) -> float:
    """Keys that a query meets in the mean: the first ones a triangle, the others a window, unless
    its document begins before: documents have exponential lengths."""
    window = model.window(layer)
    reach = window if 0 < window < seq_len else seq_len
    if document_tokens == inf:
        return reach - reach * reach / (2 * seq_len)
    ended = -document_tokens * expm1(-reach / document_tokens)
    return (document_tokens * (reach - ended) + (seq_len - reach) * ended) / seq_len


def flops_per_token(
    model: ModelConfig,
    *,
    seq_len: int,
    mean_document_tokens: int | None = None,
    adapters: AdaptersConfig | None = None,
) -> float:
    """FLOPs of forward and backward for one token; of packed documents whose mean length is known
    with attention inside these.

        6 * matmul parameters + 6 * (sum over layers of the span) * (query_dim + value_dim)

        with adapters: 4 * matmul parameters + 6 * those of adapters + the same of attention

    A weight takes a multiplication and an addition in forward, twice that in backward, once where
    it is frozen. Causal
    attention has two matmuls in forward (scores, as wide as queries, and values) over the keys that
    a query sees, half of the sequence without windows, and twice that in backward.
    """
    of = mean_document_tokens or inf
    spans = sum(
        _span_tokens(model, layer, seq_len=seq_len, document_tokens=of)
        for layer in range(model.layers)
    )
    width = model.heads * (model.head_dim + model.value_head_dim)
    of_weights = 6 * matmul_parameters(model)
    if adapters is not None:
        of_weights = 4 * matmul_parameters(model) + 6 * adapter_parameters(model, adapters)
    return of_weights + 6 * spans * width


def adapter_parameters(model: ModelConfig, adapters: AdaptersConfig) -> int:
    """Parameters of the adapters of all blocks."""
    widths = target_widths(model)
    sums = sum(sum(widths[target]) for target in adapters.targets if target in widths)
    return model.layers * adapters.rank * sums
