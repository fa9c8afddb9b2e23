"""Key heads that tensor-parallel ranks share: they gather projections where the runtime repeats
heads, and nothing where each rank has heads of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.plan import Case
from fsdpplan.spec.runtime import RUNTIMES
from tests.cost.problems import SMALL, case


def shared(tp: int, kv_heads: int, runtime: str = "megatron") -> Case:
    return case(
        replace(SMALL, heads=8, kv_heads=kv_heads),
        tp=tp,
        sequence_parallel=True,
        loss_parallel=True,
        sharding="ddp",
        runtime=runtime,
    )


@pytest.mark.parametrize("runtime", [one.name for one in RUNTIMES if one.name != "autocast"])
def test_who_repeats_heads_may_split_further_than_they_go(runtime: str) -> None:
    repeats = next(one for one in RUNTIMES if one.name == runtime).repeats_kv_heads
    for tp in (2, 4, 8):
        for kv_heads in (1, 2, 4, 8):
            problem = legal_layout_problem(shared(tp, kv_heads, runtime))
            divides = kv_heads % tp == 0
            assert (problem is None) == (divides or (repeats and tp % kv_heads == 0)), problem
            if problem is not None and tp % kv_heads == 0:
                assert "megatron" in problem


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 1), (4, 2), (8, 1)])
def test_ranks_that_share_a_head_gather_all_projections(tp: int, kv_heads: int) -> None:
    asked = shared(tp, kv_heads)
    width = SMALL.head_dim * (8 + 2 * kv_heads)
    tokens = asked.training.seq_len * asked.layout.micro_batch
    gathers = {
        when: [
            c for c in block_calls(asked) if c.when == when and c.call_bytes == 2 * tokens * width
        ]
        for when in ("forward", "backward")
    }
    assert [c.collective for c in gathers["forward"]] == ["all_gather"]
    assert [c.collective for c in gathers["backward"]] == ["reduce_scatter"]
    assert estimate(asked).step_seconds.expected > 0


def test_ranks_with_heads_of_their_own_gather_no_projection() -> None:
    own, sharing = block_calls(shared(2, 2)), block_calls(shared(2, 1))
    assert len(sharing) == len(own) + 2
