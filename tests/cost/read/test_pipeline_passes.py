"""Pipeline passes: what data parallelism adds to a pipeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given

from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.cost.play.pipeline import played_in_full, played_pipeline
from fsdpplan.cost.read.passes import Passes
from fsdpplan.cost.read.pipeline import pipeline_parts, pipeline_passes
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.traffic.rank import pp_calls, step_calls, table_seconds
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


@given(wide_cases())
def test_what_a_rank_does_and_waits_is_the_step_as_it_is_played(drawn: Case) -> None:
    assume(drawn.layout.pp > 1)
    found, parts = passes(drawn), pipeline_parts(drawn)
    whole = played_pipeline(parts.step)
    waits = found.exposed.data_parallel + dict(found.exposed.by_axis)["pp"] - table_seconds(drawn)
    step = parts.busy_seconds[parts.rank] + found.bubble_seconds + waits
    played = parts.before + max(*whole.reduced_seconds, whole.total_seconds)
    if drawn.training.traits.reduces_rounds:
        assert step >= played * (1 - 1e-9)
    else:
        assert step == pytest.approx(played, rel=1e-9)


@given(wide_cases())
def test_messages_of_the_traffic_are_those_of_the_program(drawn: Case) -> None:
    assume(drawn.layout.pp > 1)
    step = pipeline_parts(drawn).step
    sent = Counter(
        rank for rank, done in enumerate(played_in_full(step)) for one in done if one.sent
    )
    for rank, stage in enumerate(pipeline_ranks(model=drawn.model, layout=drawn.layout)):
        assert sent[rank] == sum(calls.count for calls in pp_calls(drawn, stage))


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


LOOPED = {
    "pp": 4,
    "dp_shard": 8,
    "schedule": "interleaved_1f1b",
    "virtual_stages": 4,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
    "num_microbatches": 16,
    "seq_len": 4096,
}


def test_llama_3_gathers_once_and_reduces_after_each_round_of_micro_batches() -> None:
    counts = {}
    for runtime in ("fsdp2", "llama3"):
        asked = case("llama-3.1-8b", runtime=runtime, **LOOPED)
        calls = step_calls(asked, pipeline_ranks(model=asked.model, layout=asked.layout)[1])
        blocks = [one for one in calls if one.dtype in ("bf16", "fp32") and one.call_bytes > 1e8]
        counts[runtime] = {
            name: sum(one.count for one in blocks if one.collective == name)
            for name in ("all_gather", "reduce_scatter")
        }
    # 8 blocks; torch keeps 3 stages of 4 gathered, and reduces once
    assert counts["llama3"] == {"all_gather": 8, "reduce_scatter": 4 * 8}
    assert counts["fsdp2"]["all_gather"] > 8
    assert counts["fsdp2"]["reduce_scatter"] == 8


def test_llama_3_holds_gradients_of_two_stages_and_no_messages() -> None:
    plain, freed = (
        rank_memory(case("llama-3.1-8b", runtime=runtime, **LOOPED))
        for runtime in ("fsdp2", "llama3")
    )
    assert freed.unsharded_gradients_bytes <= 0.7 * plain.unsharded_gradients_bytes
    assert freed.activations_bytes < 0.7 * plain.activations_bytes


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
def test_chunks_of_a_distributed_optimizer_hide_behind_passes_of_others(name: str) -> None:
    """Of v chunks a rank one is left to be reduced, and one to be gathered, where software does
    either beside passes; else all of them."""

    def exposed(runtime: str, chunks: int) -> float:
        return getattr(passes(optimizer_case(runtime, chunks)).exposed, name)  # type: ignore[no-any-return]

    def optimizer_case(runtime: str, chunks: int) -> Case:
        schedule = "1f1b" if chunks == 1 else "interleaved_1f1b"
        more = {"schedule": schedule, "virtual_stages": chunks, "dp_shard": 64, "seq_len": 1024}
        return case("llama-3.1-70b", runtime=runtime, **{**CHAIN, "sharding": "zero1", **more})

    whole = exposed("megatron", 1)
    assert exposed("megatron", 4) == pytest.approx(whole / 4, rel=0.4)
    assert exposed("megatron", 8) < exposed("megatron", 4) < exposed("megatron", 2) < whole
    assert exposed("megatron_lm", 4) > 0.8 * exposed("megatron_lm", 1)
