"""Tied tables: what it costs that a pipeline has two copies of one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.traffic.rank import table_calls, table_gradient_bytes, table_seconds
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from tests.cost.clusters import cluster

LLAMA_8B = load_model("llama-3.1-8b")
TIED = replace(LLAMA_8B, tied_embeddings=True)
TRAINING = Training(seq_len=2048, global_batch=8)
PIPED = Layout(
    pp=4,
    dp_shard=2,
    schedule="1f1b",
    num_microbatches=4,
    reshard_after_forward="never",
    gradient_sync="last",
)


def asked(model: Model, training: Training = TRAINING, layout: Layout = PIPED) -> Case:
    return Case(model=model, cluster=cluster(gpus=8), training=training, layout=layout)


def test_the_two_ends_exchange_their_parts_of_the_gradient_once_a_step() -> None:
    stages = pipeline_ranks(model=TIED, layout=PIPED)
    calls = [list(table_calls(asked(TIED), stage)) for stage in stages]
    assert [len(each) for each in calls] == [1, 0, 0, 1]
    (call,) = calls[0]
    assert (call.collective, call.group.axis, call.dtype) == ("send_recv", "pp", "fp32")
    assert call.count == 1
    assert call.call_bytes == 4 * 128256 // 2 * 4096


def test_tensor_parallel_ranks_exchange_their_rows_and_whole_copies_all_of_them() -> None:
    whole = replace(PIPED, sharding="ddp", dp_shard=1, reshard_after_forward="always")
    split = replace(whole, tp=2, sequence_parallel=True, loss_parallel=True)
    assert table_gradient_bytes(model=TIED, layout=whole) == 4 * 128256 * 4096
    assert table_gradient_bytes(model=TIED, layout=split) == 2 * 128256 * 4096


@pytest.mark.parametrize(
    ("model", "training", "layout"),
    [
        (LLAMA_8B, TRAINING, PIPED),
        (TIED, TRAINING, Layout(dp_shard=8)),
        (TIED, TRAINING, replace(PIPED, schedule="zbv", virtual_stages=2)),
        (TIED, replace(TRAINING, runtime="megatron"), PIPED),
    ],
    ids=["two tables", "no pipeline", "both on one rank", "another runtime"],
)
def test_others_exchange_nothing(model: Model, training: Training, layout: Layout) -> None:
    case = asked(model, training, layout)
    assert table_seconds(case) == 0.0
    for stage in pipeline_ranks(model=model, layout=layout):
        assert not list(table_calls(case, stage))


def test_all_ranks_wait_for_the_exchange() -> None:
    training = Training(seq_len=2048, global_batch=PIPED.global_batch)
    apart = estimate(asked(LLAMA_8B, training)).step_seconds.expected
    tied = estimate(asked(TIED, training)).step_seconds.expected
    exchange = table_seconds(asked(TIED, training))
    assert exchange > 0
    assert tied - apart == pytest.approx(exchange, rel=0.01)
