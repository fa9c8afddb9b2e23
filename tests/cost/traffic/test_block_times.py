"""Block times: what is shared between layouts is what each has by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.kernels.compute import block_seconds
from fsdpplan.cost.model.formats import block_ways, inner_ways
from fsdpplan.cost.model.params import dense_view
from fsdpplan.cost.traffic.block_calls import _block_calls, block_calls
from fsdpplan.cost.traffic.block_times import BlockTimes, block_times, calls_waiting
from fsdpplan.cost.traffic.calls import BlockCall
from tests.cost.problems import Case, case
from tests.cost.test_least import MIXTURE
from tests.cost.wide import wide_cases


def times(drawn: Case) -> BlockTimes:
    """Of a block of the case."""
    return block_times(drawn)


@given(wide_cases())
def test_a_block_takes_what_the_slower_of_host_and_device_needs(drawn: Case) -> None:
    found = times(drawn)
    work = block_work(drawn)
    seconds = block_seconds(work, drawn.cluster.device)
    alone = calls_waiting(calls(drawn), work=work, cluster=drawn.cluster)
    assert found.seconds == seconds
    assert found.forward_seconds == seconds.forward_seconds + found.waiting.forward_seconds
    assert found.forward_seconds + found.backward_seconds == pytest.approx(
        found.computed_seconds + sum(taken for _, taken in found.waiting.by_axis)
    )
    counts = sum(taken for axis, taken in alone.forward_by_axis if axis == "ep")
    on_device = seconds.forward_device_seconds + alone.forward_seconds
    assert found.forward_seconds == pytest.approx(
        max(seconds.forward_host_seconds + counts, on_device)
    )
    assert found.backward_seconds <= found.computed_seconds + alone.backward_seconds


@given(wide_cases())
def test_what_is_not_among_its_ways_changes_nothing_of_a_block(drawn: Case) -> None:
    layout = drawn.layout
    other_layout = replace(
        layout,
        dp_replicate=3 * layout.dp_replicate,
        num_microbatches=layout.pp * (layout.num_microbatches + 1),
        reshard_after_forward="always",
        gradient_sync="last",
        loss_chunks=2,
    )
    other = replace(drawn, layout=other_layout)
    if inner_ways(other) == inner_ways(drawn):
        assert calls(other) == calls(drawn)
    if block_ways(other) == block_ways(drawn):
        assert block_work(other) == block_work(drawn)


def test_a_block_without_experts_does_the_same_in_any_group_of_them() -> None:
    dense = dense_view(MIXTURE)
    alone, shared = (times(replace(case(MIXTURE, dp_shard=4, ep=ep), model=dense)) for ep in (1, 4))
    assert alone == shared


def calls(drawn: Case) -> tuple[BlockCall, ...]:
    """The collectives of a block of the case, computed anew."""
    _block_calls.cache_clear()
    return block_calls(drawn)
