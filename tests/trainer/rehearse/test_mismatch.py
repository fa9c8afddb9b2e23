"""Ranks that run one program never seem to differ, and one that runs another one always does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.trainer.config import LayoutConfig, parse_plan
from fsdpplan.trainer.parallel.mesh import place
from fsdpplan.trainer.rehearse.counting import Call
from fsdpplan.trainer.rehearse.mismatch import GroupCalls, mismatches
from tests.trainer import plans

Part = tuple[str, str]
"""(axis as it is counted, which of its groups)."""
Program = list[tuple[Part, Call]]

PARTS: tuple[Part, ...] = (("dp_shard", "kept"), ("dp_shard", "whole"), ("dp_replicate", "whole"))
CALLS = st.builds(
    Call, st.sampled_from(["all_gather", "reduce_scatter"]), st.just("fp32"), st.integers(1, 9)
)
PROGRAMS = st.lists(st.tuples(st.sampled_from(PARTS), CALLS), min_size=1, max_size=12)


@st.composite
def layouts(draw: st.DrawFn) -> LayoutConfig:
    """HSDP that keeps parameters on some of the ranks that share them."""
    kept, groups, replicas = (draw(st.integers(2, 4)) for _ in range(3))
    layout = {
        "dp_replicate": replicas,
        "dp_shard": kept * groups,
        "reshard_after_forward": kept,
        "micro_batch": 1,
    }
    return parse_plan(plans.plan_text(**layout)).layout


def group(layout: LayoutConfig, rank: int, part: Part) -> tuple[int, ...]:
    """The ranks that play `part` with `rank`."""
    here, kept = place(layout, rank), layout.reshard_after_forward
    assert isinstance(kept, int)
    same: dict[Part, Callable[[int], Any]] = {
        PARTS[0]: lambda other: other // kept,
        PARTS[1]: lambda other: place(layout, other).dp_replicate,
        PARTS[2]: lambda other: place(layout, other).dp_shard,
    }
    assert here.pp == 0
    key = same[part]
    return tuple(other for other in range(layout.world) if key(other) == key(rank))


def ran(layout: LayoutConfig, rank: int, program: Program) -> GroupCalls:
    """What `rank` calls, as a rehearsal writes it and reads it again."""
    calls: GroupCalls = {}
    for part, call in program:
        calls.setdefault((part[0], group(layout, rank, part)), []).append(call)
    return calls


@given(layouts(), PROGRAMS, st.data())
def test_any_two_ranks_of_one_program_match(
    layout: LayoutConfig, program: Program, data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(st.integers(0, layout.world - 1), min_size=2, unique=True))
    assert mismatches(layout, {rank: ran(layout, rank, program) for rank in ranks}) == []


@given(layouts(), PROGRAMS, st.data())
def test_a_call_that_one_rank_leaves_out_is_always_found(
    layout: LayoutConfig, program: Program, data: st.DataObject
) -> None:
    ranks = st.integers(0, layout.world - 1)
    one, other = data.draw(ranks), data.draw(ranks)
    assume(one != other)
    missing = data.draw(st.integers(0, len(program) - 1))
    less = program[:missing] + program[missing + 1 :]
    calls_of = {one: ran(layout, one, program), other: ran(layout, other, less)}
    (said, *_) = mismatches(layout, calls_of)
    assert f"over {program[missing][0][0]}: call " in said


@given(layouts(), PROGRAMS, st.data())
def test_calls_of_one_group_in_another_order_are_always_found(
    layout: LayoutConfig, program: Program, data: st.DataObject
) -> None:
    ranks = st.integers(0, layout.world - 1)
    one, other = data.draw(ranks), data.draw(ranks)
    assume(one != other)
    backwards = {key: calls[::-1] for key, calls in ran(layout, other, program).items()}
    forwards = ran(layout, other, program)
    found = mismatches(layout, {one: ran(layout, one, program), other: backwards})
    assert bool(found) == (
        json.dumps(list(forwards.values())) != json.dumps(list(backwards.values()))
    )


def test_a_member_that_never_calls_its_group_is_found_across_stages() -> None:
    layout = parse_plan(plans.plan_text(pp=2, schedule="1f1b", num_microbatches=2)).layout
    norm = {("pp", (0, 1)): [Call("all_reduce", "fp32", 4)]}
    (said,) = mismatches(layout, {0: norm, 1: {}})
    assert "call 1 is all_reduce in fp32 of 4 bytes on rank 0 and none on rank 1" in said
