"""What pipeline ranks do and when, against torch's own schedules."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import _utils as pipelining_utils
from torch.distributed.pipelining import schedules

from fsdpplan.cost.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PassOrder,
    overlapped_pairs,
)
from fsdpplan.cost.schedule.order import (
    SIMULATED_SCHEDULES,
    gathers_in_turn,
    microbatches_refusal,
    paired_passes,
    peak_in_flight,
    rank_actions,
    stage_gathers,
)
from fsdpplan.cost.step.pipeline import SEND, Shape, pipeline_program
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Schedule

SINGLE = [("gpipe", "GPipe"), ("1f1b", "1F1B")]
MULTI = {
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
IN_V = ("zbv", "dualpipev")
PASSES = {
    schedules.FORWARD: FORWARD,
    schedules.FULL_BACKWARD: BACKWARD,
    schedules.BACKWARD_INPUT: BACKWARD_INPUT,
    schedules.BACKWARD_WEIGHT: BACKWARD_WEIGHT,
}
LAST_PASSES = (BACKWARD, BACKWARD_WEIGHT)


def _takes(schedule: Schedule, pp: int, count: int) -> bool:
    return not microbatches_refusal(schedule=schedule, pp=pp, num_microbatches=count)


def _torch_table(theirs: str, pp: int, count: int, virtual: int) -> dict[int, list[Any]]:
    """Every rank's actions as torch makes them, idle steps and overlapped pairs included."""
    schedule = schedules.get_schedule_class(theirs)
    fake = SimpleNamespace(
        _stages=[None] * virtual,
        n_local_stages=virtual,
        num_stages=pp * virtual,
        pp_group_size=pp,
        _n_microbatches=count,
        microbatches_per_round=count // max(1, count // pp),
    )
    return {rank: schedule._calculate_single_rank_operations(fake, rank) for rank in range(pp)}


def _compute(actions: list[Any]) -> tuple[Action, ...]:
    """torch's actions without idle steps, gathers and reductions; pairs one after the other."""
    leaves = [leaf for action in actions if action for leaf in (action.sub_actions or (action,))]
    return tuple(
        (leaf.stage_index, leaf.microbatch_index, PASSES[leaf.computation_type])
        for leaf in leaves
        if leaf.computation_type in PASSES
    )


def _executed(theirs: str, rank: int, pp: int, count: int) -> tuple[Action, ...]:
    """What torch's schedule really runs: its table for 1F1B misnumbers the last rank."""
    done: list[Action] = []
    stage = MagicMock(stage_index=rank)
    for ops in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(stage, f"get_{ops}_ops").return_value = []
    stage.forward_one_chunk = lambda index, *_, **__: done.append((rank, index, FORWARD))
    stage.backward_one_chunk = lambda index, **_: done.append((rank, index, BACKWARD))
    fake = MagicMock(_stage=stage, _num_stages=pp, _n_microbatches=count)
    fake._check_inputs.return_value = ([()] * count, [{}] * count)
    schedules.get_schedule_class(theirs)._step_microbatches(fake)
    return tuple(done)


@pytest.mark.parametrize(("ours", "theirs"), SINGLE)
@pytest.mark.parametrize(("pp", "count"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 32)])
def test_single_stage_orders_are_those_of_torch(
    ours: Schedule, theirs: str, pp: int, count: int
) -> None:
    found = rank_actions(PassOrder(schedule=ours, pp=pp, num_microbatches=count, virtual_stages=1))
    assert found == tuple(_executed(theirs, rank, pp, count) for rank in range(pp))


@pytest.mark.parametrize("ours", MULTI)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
def test_multi_stage_orders_are_those_of_torch(ours: Schedule, pp: int) -> None:
    counts = [m for m in (1, 2, 3, 4, 6, 10, 16, 33) if _takes(ours, pp, m)]
    for count, virtual in product(counts, (2,) if ours in IN_V else (1, 2, 3)):
        table = _torch_table(MULTI[ours], pp, count, virtual)
        found = rank_actions(
            PassOrder(schedule=ours, pp=pp, num_microbatches=count, virtual_stages=virtual)
        )
        assert found == tuple(_compute(table[rank]) for rank in range(pp))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_passes_side_by_side_are_the_overlapped_pairs_of_torch(pp: int, more: int) -> None:
    count = 2 * pp + more
    table = _torch_table("DualPipeV", pp, count, 2)
    ours = rank_actions(
        PassOrder(schedule="dualpipev", pp=pp, num_microbatches=count, virtual_stages=2)
    )
    numbers = paired_passes(PassOrder("dualpipev", pp, count, 2))
    for rank, actions in enumerate(ours):
        theirs = [action for action in table[rank] if action and action.sub_actions]
        at = overlapped_pairs(PassOrder("dualpipev", pp, count, 2), rank, actions)
        assert tuple(actions[one] for one in sorted(at)) == _compute(theirs)
        firsts = [action.sub_actions[0].stage_index for action in theirs]
        assert numbers[rank] == (firsts.count(rank), firsts.count(2 * pp - 1 - rank))


@pytest.mark.parametrize("ours", MULTI)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_messages_are_those_that_torch_sends(ours: Schedule, pp: int) -> None:
    """None from a stage to the next one of its own rank."""
    order = PassOrder(ours, pp, 4 * pp, 2)
    rank_of = {stage: rank for rank, held in enumerate(order.all_held) for stage in held}
    table = _torch_table(MULTI[ours], pp, order.num_microbatches, 2)
    plain = {rank: [action for action in todo if action] for rank, todo in table.items()}
    lowered = schedules._add_send_recv(plain, rank_of.__getitem__, order.stages)
    theirs = {
        (rank, action.stage_index, action.microbatch_index, action.computation_type)
        for rank, todo in lowered.items()
        for action in todo
        if action.computation_type in (schedules.SEND_F, schedules.SEND_B)
    }
    program, lists = pipeline_program(Shape(order, "", False)), rank_actions(order)
    pass_of = {
        number: (rank, lists[rank][place])
        for rank, passes in enumerate(program.passes)
        for place, number in enumerate(passes)
    }
    found = set()
    for _, at, after in program.ops:
        if at == SEND:
            rank, (stage, index, kind) = pass_of[after]
            way = schedules.SEND_F if kind == FORWARD else schedules.SEND_B
            found.add((rank, stage, index, way))
    assert found == theirs


@pytest.mark.parametrize("schedule", MULTI)
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_stages_lie_on_the_ranks_that_torch_gives_them(schedule: Schedule, pp: int) -> None:
    style = "v" if schedule in IN_V else "loop"
    expected = pipelining_utils.generate_rank_to_stage_mapping(pp, 2 * pp, style)
    for rank in range(pp):
        found = PassOrder(schedule, pp, 0, 2).held(rank)
        assert list(found) == expected[rank]


@given(
    st.sampled_from(SIMULATED_SCHEDULES),
    st.integers(1, 6),
    st.integers(1, 24),
    st.integers(1, 3),
)
def test_every_micro_batch_goes_once_forward_and_once_back(
    schedule: Schedule, pp: int, count: int, virtual: int
) -> None:
    virtual = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}.get(schedule, virtual)
    if not _takes(schedule, pp, count):
        return
    lists = rank_actions(
        PassOrder(schedule=schedule, pp=pp, num_microbatches=count, virtual_stages=virtual)
    )
    done = Counter(action for todo in lists for action in todo)
    assert set(done.values()) == {1}
    for stage in range(pp * virtual):
        for index in range(count):
            passes = {kind for kind in range(4) if (stage, index, kind) in done}
            assert passes in ({FORWARD, BACKWARD}, {FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})


@pytest.mark.parametrize(
    ("schedule", "pp", "count", "virtual"),
    [
        *product(MULTI, [2], [4], [2]),
        *product(MULTI, [4], [8], [2]),
        *product([s for s in MULTI if s not in IN_V], [2], [6, 8], [4, 5]),
    ],
)
def test_gathers_are_those_that_torch_adds(
    schedule: Schedule, pp: int, count: int, virtual: int
) -> None:
    table = _torch_table(MULTI[schedule], pp, count, virtual)
    found = stage_gathers(
        PassOrder(schedule=schedule, pp=pp, num_microbatches=count, virtual_stages=virtual)
    )
    for rank in range(pp):
        lowered = schedules._add_unshard_reshard(list(table[rank]))
        gathers = Counter(
            action.stage_index for action in lowered if action.computation_type == schedules.UNSHARD
        )
        stages = PassOrder(schedule, pp, 0, virtual).held(rank)
        assert found[rank] == tuple(gathers[stage] for stage in stages)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble"])
@given(pp=st.integers(2, 5), virtual=st.integers(4, 6), count=st.integers(1, 60))
def test_gathers_of_many_rounds_are_those_of_the_whole_list(
    schedule: Schedule, pp: int, virtual: int, count: int
) -> None:
    if not _takes(schedule, pp, count):
        return
    shape: dict[str, Any] = {"schedule": schedule, "pp": pp, "virtual_stages": virtual}
    found = stage_gathers(PassOrder(num_microbatches=count, **shape))
    lists = rank_actions(PassOrder(num_microbatches=count, **shape))
    for rank, todo in enumerate(lists):
        counts = Counter(stage for _, stage in gathers_in_turn(todo))
        assert found[rank] == tuple(
            counts[stage] for stage in PassOrder(num_microbatches=count, **shape).held(rank)
        )


@given(st.integers(1, 8), st.integers(1, 40))
def test_one_f_one_b_holds_as_many_micro_batches_as_stages_follow(pp: int, count: int) -> None:
    held = peak_in_flight(
        PassOrder(schedule="1f1b", pp=pp, num_microbatches=count, virtual_stages=1)
    )
    assert held == tuple((min(count, pp - rank),) for rank in range(pp))
    for rank, todo in enumerate(
        rank_actions(PassOrder(schedule="1f1b", pp=pp, num_microbatches=count, virtual_stages=1))
    ):
        alive = list(accumulate(-1 if kind else 1 for _, _, kind in todo))
        assert held[rank] == (max(alive),)


@pytest.mark.parametrize("schedule", [s for s in SIMULATED_SCHEDULES if s != "1f1b"])
@given(pp=st.integers(1, 5), count=st.integers(1, 40))
def test_the_peak_is_that_of_the_whole_list(schedule: Schedule, pp: int, count: int) -> None:
    """The shortened list that it is counted on holds as much; weights' halves keep activations."""
    virtual = 1 if schedule == "gpipe" else 2
    if not _takes(schedule, pp, count):
        return
    shape: dict[str, Any] = {
        "schedule": schedule,
        "pp": pp,
        "num_microbatches": count,
        "virtual_stages": virtual,
    }
    for held, todo in zip(
        peak_in_flight(PassOrder(**shape)), rank_actions(PassOrder(**shape)), strict=True
    ):
        change = {FORWARD: 1, BACKWARD_INPUT: 0}
        assert sum(held) == max(accumulate(change.get(kind, -1) for _, _, kind in todo))


@given(st.integers(1, 8), st.integers(1, 40))
def test_gpipe_holds_all_micro_batches(pp: int, count: int) -> None:
    held = peak_in_flight(
        PassOrder(schedule="gpipe", pp=pp, num_microbatches=count, virtual_stages=1)
    )
    assert held == ((count,),) * pp


@given(st.integers(2, 6), st.integers(1, 12), st.integers(1, 3))
def test_interleaving_holds_more_the_earlier_the_rank(pp: int, rounds: int, virtual: int) -> None:
    held = peak_in_flight(
        PassOrder(
            schedule="interleaved_1f1b", pp=pp, num_microbatches=rounds * pp, virtual_stages=virtual
        )
    )
    sums = [sum(chunks) for chunks in held]
    most = rounds * pp * virtual
    assert sums == [min(most, (virtual - 1) * pp + 2 * (pp - 1 - r) + 1) for r in range(pp)]


@given(st.integers(2, 8), st.integers(4, 12))
def test_zbv_holds_the_same_on_every_rank(pp: int, rounds: int) -> None:
    """The first arm holds much on the first ranks, the second on the last: the point of the V."""
    held = peak_in_flight(
        PassOrder(schedule="zbv", pp=pp, num_microbatches=rounds * pp, virtual_stages=2)
    )
    sums = [sum(arms) for arms in held]
    assert max(sums) - min(sums) <= 1
    assert max(sums) <= 2 * pp


@given(st.sampled_from(["1f1b", "interleaved_1f1b", "zbv"]), st.integers(1, 6), st.integers(1, 60))
def test_a_shortened_run_keeps_the_remainder(schedule: Schedule, pp: int, count: int) -> None:
    if not _takes(schedule, pp, count):
        return
    short = PassOrder(schedule, pp, count, 2).shortened(4).num_microbatches
    round_size = count // max(1, count // pp) if schedule == "interleaved_1f1b" else pp
    assert short <= count
    assert short <= 4 * round_size
    assert (count - short) % round_size == 0
    assert _takes(schedule, pp, short) or count < pp


def test_torch_refuses_uneven_rounds_and_short_1f1b() -> None:
    assert microbatches_refusal(schedule="1f1b", pp=4, num_microbatches=3)
    assert microbatches_refusal(schedule="dualpipev", pp=4, num_microbatches=7)
    assert not microbatches_refusal(schedule="zbv", pp=4, num_microbatches=3)
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        assert microbatches_refusal(schedule=schedule, pp=4, num_microbatches=9)
        assert not microbatches_refusal(schedule=schedule, pp=4, num_microbatches=10)
        with pytest.raises(SpecError, match="2 equal rounds"):
            rank_actions(PassOrder(schedule=schedule, pp=4, num_microbatches=9, virtual_stages=2))


def test_a_schedule_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot be predicted"):
        rank_actions(PassOrder(schedule="none", pp=2, num_microbatches=4, virtual_stages=2))


@pytest.mark.parametrize(
    ("schedule", "virtual", "words"),
    [
        ("1f1b", 2, "one stage a rank"),
        ("gpipe", 3, "one stage a rank"),
        ("zbv", 1, "two stages a rank"),
        ("dualpipev", 3, "two stages a rank"),
    ],
)
def test_other_numbers_of_stages_a_rank_are_refused(
    schedule: Schedule, virtual: int, words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        rank_actions(PassOrder(schedule=schedule, pp=2, num_microbatches=4, virtual_stages=virtual))
