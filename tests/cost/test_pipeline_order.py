"""What pipeline ranks do and when, against torch's own schedules."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from fsdpplan.cost.pipeline_order import (
    Action,
    microbatches_refusal,
    peak_in_flight,
    rank_actions,
    steady_microbatches,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Schedule

SINGLE = [("gpipe", "GPipe"), ("1f1b", "1F1B")]
MULTI = [("interleaved_1f1b", "Interleaved1F1B"), ("looped_bfs", "LoopedBFS")]


def _torch_actions(order: Any) -> tuple[tuple[Action, ...], ...]:
    """torch's table without waits and reductions."""
    compute = {schedules.FORWARD: False, schedules.FULL_BACKWARD: True}
    return tuple(
        tuple(
            (action.stage_index, action.microbatch_index, compute[action.computation_type])
            for action in order[rank]
            if action is not None and action.computation_type in compute
        )
        for rank in sorted(order)
    )


def _executed(theirs: str, rank: int, pp: int, count: int) -> tuple[Action, ...]:
    """What torch's schedule really runs: its table for 1F1B misnumbers the last rank."""
    done: list[Action] = []
    stage = MagicMock(stage_index=rank)
    for ops in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(stage, f"get_{ops}_ops").return_value = []
    stage.forward_one_chunk = lambda index, *_, **__: done.append((rank, index, False))
    stage.backward_one_chunk = lambda index, **_: done.append((rank, index, True))
    fake = MagicMock(_stage=stage, _num_stages=pp, _n_microbatches=count)
    fake._check_inputs.return_value = ([()] * count, [{}] * count)
    schedules.get_schedule_class(theirs)._step_microbatches(fake)
    return tuple(done)


@pytest.mark.parametrize(("ours", "theirs"), SINGLE)
@pytest.mark.parametrize(("pp", "count"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 32)])
def test_single_stage_orders_are_those_of_torch(
    ours: Schedule, theirs: str, pp: int, count: int
) -> None:
    found = rank_actions(schedule=ours, pp=pp, num_microbatches=count, virtual_stages=1)
    assert found == tuple(_executed(theirs, rank, pp, count) for rank in range(pp))


@pytest.mark.parametrize(("ours", "theirs"), MULTI)
@pytest.mark.parametrize(
    ("pp", "count", "virtual"), [(2, 2, 2), (4, 8, 2), (4, 10, 3), (4, 3, 2), (8, 32, 2)]
)
def test_multi_stage_orders_are_those_of_torch(
    ours: Schedule, theirs: str, pp: int, count: int, virtual: int
) -> None:
    schedule = schedules.get_schedule_class(theirs)
    rounds = max(1, count // pp)
    fake = SimpleNamespace(
        _stages=[None] * virtual,
        n_local_stages=virtual,
        pp_group_size=pp,
        _n_microbatches=count,
        microbatches_per_round=count // rounds,
    )
    order = {rank: schedule._calculate_single_rank_operations(fake, rank) for rank in range(pp)}
    found = rank_actions(schedule=ours, pp=pp, num_microbatches=count, virtual_stages=virtual)
    assert found == _torch_actions(order)


@given(st.integers(1, 8), st.integers(1, 40))
def test_one_f_one_b_holds_as_many_micro_batches_as_stages_follow(pp: int, count: int) -> None:
    held = peak_in_flight(schedule="1f1b", pp=pp, num_microbatches=count, virtual_stages=1)
    assert held == tuple((min(count, pp - rank),) for rank in range(pp))
    for rank, todo in enumerate(
        rank_actions(schedule="1f1b", pp=pp, num_microbatches=count, virtual_stages=1)
    ):
        alive = list(accumulate(-1 if backward else 1 for _, _, backward in todo))
        assert held[rank] == (max(alive),)


@given(st.integers(1, 8), st.integers(1, 40))
def test_gpipe_holds_all_micro_batches(pp: int, count: int) -> None:
    held = peak_in_flight(schedule="gpipe", pp=pp, num_microbatches=count, virtual_stages=1)
    assert held == ((count,),) * pp


@given(st.integers(2, 6), st.integers(1, 12), st.integers(1, 3))
def test_interleaving_holds_more_the_earlier_the_rank(pp: int, rounds: int, virtual: int) -> None:
    held = peak_in_flight(
        schedule="interleaved_1f1b", pp=pp, num_microbatches=rounds * pp, virtual_stages=virtual
    )
    sums = [sum(chunks) for chunks in held]
    most = rounds * pp * virtual
    assert sums == [min(most, (virtual - 1) * pp + 2 * (pp - 1 - r) + 1) for r in range(pp)]


@given(st.integers(1, 6), st.integers(1, 60))
def test_a_shortened_run_keeps_the_remainder(pp: int, count: int) -> None:
    short = steady_microbatches(schedule="1f1b", pp=pp, num_microbatches=count, rounds=4)
    assert short <= count
    assert short <= 4 * pp
    assert (count - short) % pp == 0


def test_torch_refuses_uneven_rounds_and_short_1f1b() -> None:
    assert microbatches_refusal(schedule="1f1b", pp=4, num_microbatches=3)
    assert microbatches_refusal(schedule="interleaved_1f1b", pp=4, num_microbatches=9)
    assert not microbatches_refusal(schedule="interleaved_1f1b", pp=4, num_microbatches=10)
    with pytest.raises(SpecError, match="2 equal rounds"):
        rank_actions(schedule="interleaved_1f1b", pp=4, num_microbatches=9, virtual_stages=2)


@pytest.mark.parametrize("schedule", ["none", "zbv", "dualpipev", "interleaved_zero_bubble"])
def test_schedules_that_are_not_known_are_refused(schedule: Schedule) -> None:
    with pytest.raises(SpecError, match="cannot be predicted"):
        rank_actions(schedule=schedule, pp=2, num_microbatches=4, virtual_stages=2)


def test_virtual_stages_without_interleaving_are_refused() -> None:
    with pytest.raises(SpecError, match="one stage a rank"):
        rank_actions(schedule="1f1b", pp=2, num_microbatches=4, virtual_stages=2)
