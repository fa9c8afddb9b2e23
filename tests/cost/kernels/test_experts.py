"""Experts: what routing moves."""

from __future__ import annotations

from fsdpplan.cost.kernels.operators import expert_bytes
from tests.cost.works import work


def test_dense_blocks_route_nothing() -> None:
    assert expert_bytes(work()) == (0, 0)


def test_mixtral_by_hand() -> None:
    tokens, hidden = 4096, 4096
    copies = tokens * 2 * hidden * 2
    router = 6 * 4 * tokens * 8
    forward = 5 * copies + tokens * hidden * 2 + router
    assert expert_bytes(work("mixtral-8x7b")) == (forward, forward + copies)


def test_expert_parallelism_sorts_twice_more_and_fused_kernels_weight_while_summing() -> None:
    alone = expert_bytes(work("mixtral-8x7b", compiled=False))[0]
    copies = 4096 * 2 * 4096 * 2
    assert expert_bytes(work("mixtral-8x7b", compiled=False, ep=2))[0] == alone + 4 * copies
    fused = expert_bytes(work("mixtral-8x7b", compiled=False, fused_kernels=True))[0]
    assert fused == alone - 2 * copies
