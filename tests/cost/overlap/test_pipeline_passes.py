"""Pipeline passes: what data parallelism adds to a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given

from fsdpplan.cost.overlap.passes import Passes
from fsdpplan.cost.overlap.pipeline_passes import pipeline_passes
from fsdpplan.cost.schedule.stages import pipeline_ranks
from tests.cost.problems import Case, case
from tests.cost.wide import wide_cases

CHAIN = {
    "pp": 4,
    "schedule": "1f1b",
    "gradient_sync": "last",
    "num_microbatches": 8,
    "seq_len": 4096,
}


def passes(case: Case) -> Passes:
    """All passes of the busiest rank."""
    return pipeline_passes(case)


@given(wide_cases())
def test_the_busiest_rank_is_one_of_them_and_waits_a_bubble(drawn: Case) -> None:
    assume(drawn.layout.pp > 1)
    found = passes(drawn)
    assert 0 <= found.pp_rank < len(pipeline_ranks(model=drawn.model, layout=drawn.layout))
    assert found.busy_seconds > 0
    assert min(found.bubble_seconds, found.exposed.total) >= 0


def test_a_pipeline_alone_waits_for_messages_only() -> None:
    found = passes(case("llama-3.1-8b", sharding="ddp", **CHAIN))
    assert found.exposed.data_parallel == 0
    assert dict(found.exposed.by_axis)["pp"] > 0


def test_reductions_after_the_last_backward_are_longer_than_beside_it() -> None:
    zero = {**CHAIN, "sharding": "zero1", "dp_shard": 8}
    beside = passes(case("llama-3.1-8b", runtime="megatron", **zero)).exposed
    after = passes(case("llama-3.1-8b", runtime="megatron_2020", **zero)).exposed
    assert beside.reduce_scatter + beside.all_reduce < 0.5 * (
        after.reduce_scatter + after.all_reduce
    )


def test_more_micro_batches_do_not_add_to_what_a_step_does_once() -> None:
    sharded = {**CHAIN, "dp_shard": 8, "reshard_after_forward": "never"}
    few, many = (
        passes(case("llama-3.1-8b", **{**sharded, "num_microbatches": number})).exposed
        for number in (8, 32)
    )
    assert many.data_parallel == pytest.approx(few.data_parallel, rel=0.2)


def test_an_uneven_split_waits_for_its_largest_stage() -> None:
    even = case("llama-3.1-8b", sharding="ddp", stage_blocks=(8, 8, 8, 8), **CHAIN)
    uneven = replace(even, layout=replace(even.layout, stage_blocks=(5, 17, 5, 5)))
    assert passes(uneven).pp_rank == 1
    assert passes(uneven).busy_seconds > 1.5 * passes(even).busy_seconds
