"""Experts: memory traffic around a mixture's grouped matmuls on one rank.

The router scores each token, tokens are copied into the order of their experts and back, and the
experts' outputs are weighted and summed. The matmuls are in `products`, the exchange between ranks
is communication. All experts are taken as equally popular: load imbalance, and the tokens that a
capacity limit drops, are not modelled.
"""

from __future__ import annotations

from fsdpplan.cost.kernels.work import BlockWork

ROUTER_PASSES = 6
"""fp32 passes over the router's scores in each direction: softmax or sigmoid reads and writes, the
choice of the best reads, the histogram of the choice reads and writes what little there is."""

FP32_BYTES = 4


def expert_bytes(work: BlockWork) -> tuple[float, float]:
    """Traffic of routing in (forward, backward), in bytes.

    Passes over the copies of the tokens, `active` for each token: gathered (2), weighted (2) and
    summed (1, and one over the tokens); split among ranks, sorted by expert after the exchange and
    back before it (4). Hand-written kernels weight while they sum. Backward mirrors forward, and
    reads the outputs once more for the gradient of the weights.
    """
    experts = work.model.experts
    if experts is None:
        return 0.0, 0.0
    routed = work.routed_tokens
    copies = routed * experts.active * work.model.hidden * work.element_bytes
    tokens = routed * work.model.hidden * work.element_bytes
    passes = 3 if work.kernels == "fused" else 5
    if work.ep > 1 or work.experts_over_tp:
        passes += 4
    router = ROUTER_PASSES * FP32_BYTES * routed * experts.experts
    forward = passes * copies + tokens + router
    return forward, forward + copies
