"""States: time of what mixes tokens but attention over all keys, from FLOPs and bytes alone.

    states     max(FLOPs of the chunks at the share of the peak of fused attention, bytes of their
               kernels over the memory bandwidth); backward makes the states again: 3 times the
               FLOPs and the bytes of forward
    chosen     the cheaper of attention over all keys, the others masked, and of attention over the
               chosen ones in the latent, which all heads share; and the indexer's scores beside it

No measured run has such blocks, so nothing here is fitted, and the fused kernels of
flash-linear-attention and mamba-ssm are taken to be there: those of transformers in PyTorch alone
do other sums, one operator after the other, and are slower by far.
"""

from __future__ import annotations

from math import inf

from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.kernels.rates import memory_bytes_per_second
from fsdpplan.cost.model.mixers import indexer_flops_per_token, mixer_state
from fsdpplan.cost.model.params import attention_span_tokens
from fsdpplan.spec.cluster import Device

BACKWARD_TIMES = 3.0
"""Backward makes the states of the chunks again, and two products for each of forward."""

INDEX_BYTES = 12
"""Of each score of an indexer: fp32, written once, and read twice to choose the best."""


def states_seconds(work: BlockWork, device: Device) -> tuple[float, float]:
    """(forward, backward) seconds of one block's states on one rank."""
    state = mixer_state(work.model)
    tokens = work.tokens / work.tp
    peak = device.peak_flops_per_second(work.activation_dtype) * device.fit.sustained(work.family)
    moved = tokens * state.traffic * work.element_bytes / memory_bytes_per_second(device)
    flops = tokens * state.flops
    fit = device.fit
    return (
        max(flops / (peak * fit.attention_forward_fraction), moved),
        BACKWARD_TIMES * max(flops / (peak * fit.attention_backward_fraction), moved),
    )


def index_seconds(work: BlockWork, device: Device) -> tuple[float, float]:
    """(forward, backward) seconds of an indexer: scores by all keys, of which backward needs those
    that were chosen, twice."""
    latent = work.model.latent
    assert latent is not None
    assert latent.indexer is not None
    documents = work.document_tokens
    span = attention_span_tokens(seq_len=work.seq_len, document_tokens=documents)
    chosen = attention_span_tokens(
        seq_len=work.seq_len, window=latent.indexer.keys, document_tokens=documents
    )
    peak = device.peak_flops_per_second(work.activation_dtype) * device.fit.sustained(work.family)
    rate = peak * device.fit.attention_forward_fraction
    flops = indexer_flops_per_token(work.model, seq_len=work.seq_len, document_tokens=documents)
    moved = INDEX_BYTES * span / memory_bytes_per_second(device)
    forward = work.tokens * (flops / rate + moved)
    return forward, 2 * forward * chosen / span if span < inf else 0.0
