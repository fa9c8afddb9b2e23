"""Head pieces: the matmuls of a whole loss, little more time, and the logits of one piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.kernels.head import layout_head_seconds, loss_pieces
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, Estimate
from fsdpplan.spec.training import Training
from tests.cost.clusters import cluster

LLAMA = load_model("llama-3.1-8b")
FLAT = Layout(dp_shard=8, micro_batch=2)
TRAINING = Training(seq_len=4096, global_batch=16)


def asked(layout: Layout, training: Training = TRAINING) -> Case:
    return Case(model=LLAMA, cluster=cluster(gpus=8), training=training, layout=layout)


def predicted(layout: Layout) -> Estimate:
    training = replace(TRAINING, global_batch=layout.global_batch)
    return estimate(asked(layout, training))


def test_pieces_take_a_little_more_time_and_much_less_memory() -> None:
    whole, pieces = predicted(FLAT), predicted(replace(FLAT, loss_chunks=8))
    ratio = pieces.step_seconds.expected / whole.step_seconds.expected
    assert 1.0 <= ratio < 1.01
    logits = 2 * 4096 * LLAMA.vocab
    assert whole.memory.logits_bytes == 4 * logits
    assert pieces.memory.logits_bytes <= 6 * logits // 8
    assert pieces.memory.peak_device_bytes < whole.memory.peak_device_bytes - 2 * logits
    eager, eager_pieces = (
        predicted(replace(FLAT, compile=False, loss_chunks=number)) for number in (1, 8)
    )
    assert eager.memory.logits_bytes == 12 * logits
    assert eager_pieces.memory.peak_device_bytes < eager.memory.peak_device_bytes - 4 * logits


@settings(max_examples=20, deadline=None)
@given(chunks=st.integers(2, 64))
def test_more_pieces_never_need_more_memory_nor_less_time(chunks: int) -> None:
    fewer, more = (replace(FLAT, loss_chunks=number) for number in (chunks, 2 * chunks))
    a, b = predicted(fewer), predicted(more)
    assert b.memory.peak_device_bytes <= a.memory.peak_device_bytes
    assert sum(head_seconds(more)) >= sum(head_seconds(fewer)) * (1 - 1e-9)


def head_seconds(layout: Layout) -> tuple[float, float]:
    return layout_head_seconds(asked(layout))


@pytest.mark.parametrize("compiled", [True, False])
def test_forward_has_the_matmuls_and_backward_scales(compiled: bool) -> None:
    layout = replace(FLAT, compile=compiled)
    whole, pieces = head_seconds(layout), head_seconds(replace(layout, loss_chunks=8))
    assert pieces[0] > 0.9 * sum(whole)
    assert pieces[1] < 0.2 * whole[1]


def test_pieces_are_priced_apart_from_compilation() -> None:
    eager, compiled = (
        sum(head_seconds(replace(FLAT, compile=compiled, loss_chunks=8)))
        for compiled in (False, True)
    )
    assert compiled < eager
    tensor_parallel = Layout(
        tp=8, micro_batch=16, sequence_parallel=True, loss_parallel=True, loss_chunks=8
    )
    assert head_seconds(tensor_parallel) == head_seconds(replace(tensor_parallel, compile=False))


def test_a_gradient_in_another_dtype_is_summed_in_that_of_the_weight() -> None:
    stage = whole_model(LLAMA)
    weights = LLAMA.vocab * LLAMA.hidden
    fsdp = loss_pieces(asked(replace(FLAT, loss_chunks=4)), stage)
    ddp_layout = Layout(dp_replicate=8, sharding="ddp", micro_batch=2, loss_chunks=4)
    ddp = loss_pieces(asked(ddp_layout), stage)
    assert fsdp is not None
    assert ddp is not None
    assert (fsdp.weight_gradient, fsdp.product) == (2 * weights, 0)
    assert (ddp.weight_gradient, ddp.product) == (4 * weights, 2 * weights)
    assert loss_pieces(asked(FLAT), stage) is None


def test_uneven_pieces_reduce_all_tokens_under_tensor_parallelism() -> None:
    layout = Layout(tp=8, micro_batch=16, sequence_parallel=True, loss_parallel=True, loss_chunks=7)
    calls = [
        step_calls(asked(one), whole_model(LLAMA))
        for one in (layout, replace(layout, loss_chunks=1))
    ]
    reduced = [
        sum(
            call.count * call.call_bytes
            for call in found
            if call.group.axis == "tp" and call.collective == "all_reduce"
        )
        for found in calls
    ]
    assert reduced[0] == reduced[1]
