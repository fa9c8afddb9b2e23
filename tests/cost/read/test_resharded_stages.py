"""Stages that are resharded behind each forward pass of a pipeline: what that sends, takes and
spares. Calls and memory are held against torch in tests/ground_truth/test_pipeline.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.estimate import step_time
from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.cost.read.pipeline import pipeline_parts, regathering_seconds
from fsdpplan.cost.schedule.actions import BACKWARD, FORWARD, regathering_passes
from fsdpplan.cost.schedule.order import layout_order, rank_actions
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.report.of_plan import plan_report
from fsdpplan.run.trace.chrome import trace_document
from fsdpplan.run.trace.overlay import axis_groups
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES
from fsdpplan.spec.runtime import RUNTIMES
from tests.cost.problems import SMALL, Case, case
from tests.report.plans import plan_with

FREED = {
    "pp": 4,
    "dp_shard": 8,
    "schedule": "1f1b",
    "gradient_sync": "last",
    "num_microbatches": 8,
    "reshard_after_forward": "always",
    "seq_len": 4096,
}
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs")


@st.composite
def freed_cases(draw: st.DrawFn) -> Case:
    """Legal layouts that reshard stages."""
    schedule = draw(st.sampled_from(SCHEDULES))
    tp = draw(st.sampled_from([1, 1, 2]))
    pp = draw(st.sampled_from([2, 4]))
    drawn = case(
        replace(SMALL, layers=draw(st.integers(8, 24))),
        runtime="automodel",
        profile=draw(st.sampled_from(["dgx-a100-80g-hdr1", "dgx-h100", "p4d-24xlarge"])),
        seq_len=draw(st.sampled_from([512, 4096])),
        pp=pp,
        tp=tp,
        dp_shard=draw(st.sampled_from([2, 8, 16])),
        dp_replicate=draw(st.sampled_from([1, 2])),
        schedule=schedule,
        virtual_stages=draw(st.integers(2, 3)) if schedule in SCHEDULES[2:] else 1,
        num_microbatches=pp * draw(st.integers(1, 5)),
        gradient_sync="last",
        reshard_after_forward="always",
        sequence_parallel=tp > 1,
        loss_parallel=tp > 1,
        wrap_blocks=draw(st.integers(1, 3)),
        activation_checkpointing=draw(st.sampled_from(["none", "op", "full"])),
        offload=draw(st.sampled_from(["none", "none", "cpu"])),
        compile=draw(st.booleans()),
    )
    assume(drawn.problem is None)
    return drawn


def gathered_bytes(one: Case, rank: int = 0) -> int:
    """All-gathered by a pipeline rank among its shard group in a step."""
    stage = pipeline_ranks(model=one.model, layout=one.layout)[rank]
    calls = step_calls(one, stage)
    of_shards = [each for each in calls if each.group.axis == "dp_shard"]
    return sum(
        each.count * each.call_bytes for each in of_shards if each.collective == "all_gather"
    )


@pytest.mark.parametrize("rank", [0, 3])
def test_each_micro_batch_gathers_the_blocks_of_a_stage_once_more(rank: int) -> None:
    asked = case("llama-3.1-8b", runtime="automodel", **FREED)
    kept = asked.with_layout(reshard_after_forward="never")
    once = gathered_bytes(kept, rank)
    more = [
        gathered_bytes(asked.with_layout(num_microbatches=number), rank) - once
        for number in (4, 8, 12, 16)
    ]
    assert more == [number * more[0] // 4 for number in (4, 8, 12, 16)]
    assert 0 < more[0] <= 4 * once


@given(freed_cases())
def test_passes_behind_forward_passes_gather(drawn: Case) -> None:
    layout = drawn.layout
    for todo in rank_actions(layout_order(layout)):
        found = regathering_passes(todo)
        assert len(found) == sum(kind == FORWARD for _, _, kind in todo)
        backward = {at for at, (_, _, kind) in enumerate(todo) if kind == BACKWARD}
        assert found & backward


@given(freed_cases())
def test_what_is_freed_needs_no_more_room_and_no_less_time(drawn: Case) -> None:
    kept = drawn.with_layout(reshard_after_forward="never")
    assert rank_memory(drawn).peak_device_bytes <= rank_memory(kept).peak_device_bytes
    assert step_time(drawn).time.total_seconds >= step_time(kept).time.total_seconds * (1 - 1e-9)


@given(freed_cases())
def test_no_pass_hides_more_than_it_gathers(drawn: Case) -> None:
    step = pipeline_parts(drawn).step
    for plain, freed in zip(step.passes, step.paired, strict=True):
        assert plain[0] <= freed[0]
        assert plain[1] <= freed[1]


def test_on_a_link_without_end_gathering_again_costs_copies_alone() -> None:
    asked = case("llama-3.1-8b", runtime="automodel", **FREED)
    free = replace(
        asked.cluster,
        levels=tuple(
            replace(
                level,
                latency_seconds=0.0,
                base_seconds=0.0,
                port_bandwidth_bytes_per_second=1e18,
                half_bandwidth_bytes=1.0,
            )
            for level in asked.cluster.levels
        ),
    )
    fast = replace(asked, cluster=free)
    kept = fast.with_layout(reshard_after_forward="never")
    stage = pipeline_ranks(model=asked.model, layout=asked.layout)[1]
    forward, backward = regathering_seconds(fast, stage)
    copies = asked.layout.num_microbatches * max(forward, backward)
    more = step_time(fast).time.total_seconds - step_time(kept).time.total_seconds
    assert 0 <= more <= 1.5 * copies
    assert copies < 0.02 * step_time(kept).time.total_seconds
    slow = step_time(asked).time.total_seconds
    assert slow - step_time(asked.with_layout(reshard_after_forward="never")).time.total_seconds > (
        more
    )


@given(freed_cases())
def test_no_step_is_shorter_than_what_passes_a_level(drawn: Case) -> None:
    step = step_time(drawn)
    for level in drawn.cluster.levels:
        passing = sum(row.seconds for row in step.communication if row.level == level.name)
        assert passing <= step.time.total_seconds * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_it_has_a_report_and_a_trace(schedule: str, offload: str) -> None:
    looped = schedule in SCHEDULES[2:]
    layout = {**FREED, "schedule": schedule, "virtual_stages": 2 if looped else 1}
    asked = case("llama-3.1-8b", runtime="automodel", offload=offload, **layout)
    plan = plan_with("llama-3.1-8b", asked.layout, runtime="automodel")
    assert plan_report(plan, about="a plan").sections
    timeline = step_timeline(plan.case)
    groups = axis_groups(plan.case, timeline.rank)
    assert trace_document(timeline, plan.layout, name="a plan", groups=groups)["traceEvents"]


@pytest.mark.parametrize("runtime", [one.name for one in RUNTIMES])
def test_it_is_legal_for_the_software_that_does_it(runtime: str) -> None:
    asked = case("llama-3.1-8b", runtime=runtime, **FREED)
    problem = first_problem(asked)
    can = asked.training.traits.reshards_stages
    assert can == (runtime == "automodel")
    if can:
        assert problem is None
    else:
        assert problem is not None
        if runtime != "autocast":  # which is refused a pipeline at all
            assert problem.reason == "FSDP inside a pipeline without reshard never"


@pytest.mark.parametrize("schedule", sorted(SPLIT_BACKWARD_SCHEDULES))
def test_not_where_it_trains_wrong(schedule: str) -> None:
    layout = {**FREED, "schedule": schedule, "virtual_stages": 2, "compile": False}
    problem = first_problem(case("llama-3.1-8b", runtime="automodel", **layout))
    assert problem is not None
    assert problem.reason == "split-backward schedules with resharding"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"reshard_after_forward": 4}, "always or never"),
        ({"schedule": "interleaved_1f1b", "virtual_stages": 4}, "at most 3"),
    ],
)
def test_nor_what_is_not_priced(changes: dict[str, object], word: str) -> None:
    problem = first_problem(case("llama-3.1-8b", runtime="automodel", **{**FREED, **changes}))
    assert problem is not None
    assert word in problem.sentence
