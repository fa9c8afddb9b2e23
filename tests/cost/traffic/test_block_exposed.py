"""Block waiting: what collectives inside a block add to it, and what they hide behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fsdpplan.cost.block.operators import block_operators
from fsdpplan.cost.block.work import block_work
from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.cost.traffic.block_times import BlockWaiting, block_times, exposed_seconds
from fsdpplan.cost.traffic.calls import BlockCall, group_seconds
from tests.cost.problems import Case, case
from tests.cost.wide import MIXTURE, wide_cases

TP = {"tp": 8, "sharding": "ddp", "sequence_parallel": True, "loss_parallel": True}


def waiting(case: Case) -> BlockWaiting:
    """Waiting of one block."""
    return block_times(case).waiting


def calls(case: Case) -> tuple[BlockCall, ...]:
    """Its collectives."""
    return block_calls(case)


def total(waiting: BlockWaiting) -> float:
    """Over axes and both passes."""
    return sum(taken for _, taken in waiting.by_axis)


def at_once(case: Case) -> Case:
    """With a host that takes no time, beside which nothing hides."""
    device = case.cluster.device
    device = replace(device, fit=replace(device.fit, kernel_launch_seconds=0.0))
    return replace(case, cluster=replace(case.cluster, device=device))


def seconds(call: BlockCall, case: Case) -> float:
    """What the calls take alone."""
    once = group_seconds(case.cluster, call.group, call.collective, call.call_bytes)
    return call.count * once


def exposed(call: BlockCall, case: Case) -> float:
    """What they add to the block."""
    work = block_work(case)
    return exposed_seconds(call, work=work, cluster=case.cluster)


@given(wide_cases())
def test_a_collective_adds_at_most_what_it_takes(drawn: Case) -> None:
    for call in calls(drawn):
        assert 0 <= exposed(call, drawn) <= seconds(call, drawn)


@given(wide_cases())
def test_waiting_is_the_sum_over_axes(drawn: Case) -> None:
    found = waiting(drawn)
    assert total(found) == pytest.approx(found.forward_seconds + found.backward_seconds)
    used = {"tp": drawn.layout.tp, "cp": drawn.layout.cp, "ep": drawn.layout.ep}
    for axis, _ in found.by_axis:
        assert used[axis] > 1


def test_without_overlap_everything_is_waited_for() -> None:
    plain = case("llama-3.1-8b", seq_len=8192, micro_batch=4, **TP)
    assert total(waiting(plain)) == pytest.approx(sum(seconds(c, plain) for c in calls(plain)))


def test_cutting_into_chunks_hides_most_of_a_collective_that_is_shorter_than_its_matmul() -> None:
    serial = case("llama-3.1-70b", seq_len=8192, micro_batch=8, **TP)
    chunked = serial.with_layout(async_tp=True)
    assert waiting(chunked).forward_seconds < 0.3 * waiting(serial).forward_seconds
    # torch cannot cut the reductions of backward, behind which there is more than one matmul
    reductions = [
        c for c in calls(chunked) if (c.when, c.collective) == ("backward", "reduce_scatter")
    ]
    assert [exposed(c, chunked) for c in reductions] == [seconds(c, chunked) for c in reductions]


def test_chunks_of_few_rows_hide_nothing() -> None:
    tiny = at_once(case("llama-3.1-8b", seq_len=128, async_tp=True, **TP))
    serial = tiny.with_layout(async_tp=False)
    assert waiting(tiny).forward_seconds > 0.7 * waiting(serial).forward_seconds


def test_reductions_of_input_gradients_hide_behind_those_of_weights() -> None:
    torch, megatron = (
        case("llama-3.1-70b", seq_len=8192, micro_batch=4, runtime=runtime, **TP)
        for runtime in ("fsdp2", "megatron")
    )
    assert waiting(megatron).forward_seconds == pytest.approx(waiting(torch).forward_seconds)
    assert waiting(megatron).backward_seconds < 0.6 * waiting(torch).backward_seconds


def test_attention_over_long_sequences_hides_keys_and_values() -> None:
    def share(seq_len: int) -> float:
        run = at_once(case("llama-3.1-8b", cp=4, dp_shard=2, seq_len=seq_len))
        return total(waiting(run)) / sum(seconds(c, run) for c in calls(run))

    assert share(131072) < 0.2 < 0.4 < share(512)


def test_dispatch_and_combine_are_waited_for() -> None:
    run = case(MIXTURE, dp_shard=16, ep=16)
    assert total(waiting(run)) == pytest.approx(sum(seconds(c, run) for c in calls(run)))
    dense = replace(run, model=replace(MIXTURE, experts=None), layout=replace(run.layout, ep=1))
    assert waiting(dense) == BlockWaiting()


@given(wide_cases())
def test_a_collective_stands_beside_an_operator_of_the_block(drawn: Case) -> None:
    places = {operator.place for operator in block_operators(block_work(drawn))}
    assert {call.place for call in calls(drawn)} <= places


def test_tokens_leave_for_their_experts_before_them_and_come_back_behind() -> None:
    exchanged = [
        (call.when, call.place, call.is_first)
        for call in calls(case(MIXTURE, dp_shard=2, ep=2))
        if call.collective == "all_to_all"
    ]
    assert exchanged == [
        ("forward", "ffn_in", True),
        ("forward", "ffn_out", False),
        ("backward", "ffn_out", True),
        ("backward", "ffn_in", False),
    ]
