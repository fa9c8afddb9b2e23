"""Norms over all heads: two sums a pass where ranks have some heads each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.traffic.block_calls import block_calls
from tests.cost.problems import SMALL, case

OLMO2 = replace(SMALL, qk_norm=True, qk_norm_width="all_heads")
TP = {"tp": 2, "sequence_parallel": True, "loss_parallel": True, "sharding": "ddp"}


@pytest.mark.parametrize(("mode", "sums"), [("none", 4), ("attention", 4), ("op", 6), ("full", 6)])
def test_each_pass_sums_squares_of_queries_and_of_keys(mode: str, sums: int) -> None:
    asked = case(OLMO2, activation_checkpointing=mode, **TP)
    calls = block_calls(asked)
    found = [call for call in calls if call.collective == "all_reduce"]
    assert sum(call.count for call in found) == sums
    assert {call.call_bytes for call in found} == {4 * 1024}


def test_a_norm_of_each_head_sums_nothing() -> None:
    asked = case(replace(OLMO2, qk_norm_width="head"), **TP)
    calls = block_calls(asked)
    assert not [call for call in calls if call.collective == "all_reduce"]
