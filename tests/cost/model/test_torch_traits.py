"""Torch traits: newer releases hold no more, and what is not said is priced as the older ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from tests.cost.clusters import cluster
from tests.ground_truth.shapes import LLAMA_SMALL_VOCAB

MODEL = replace(LLAMA_SMALL_VOCAB, layers=8)
PIPED = Layout(
    compile=False,
    pp=2,
    dp_shard=4,
    schedule="1f1b",
    num_microbatches=6,
    reshard_after_forward="never",
    gradient_sync="last",
)
LAYOUTS = {
    "1f1b": PIPED,
    "zbv": replace(PIPED, schedule="zbv", virtual_stages=2),
    "zero bubble": replace(PIPED, schedule="interleaved_zero_bubble", virtual_stages=2),
    "no pipeline": Layout(dp_shard=8, compile=False),
}


def peak_bytes(layout: Layout, *, rank: int, torch: str | None) -> int:
    training = Training(seq_len=2048, global_batch=layout.global_batch, torch=torch)
    asked = Case(model=MODEL, cluster=cluster(gpus=8), training=training, layout=layout)
    stage = pipeline_ranks(model=MODEL, layout=layout)[rank]
    in_flight = in_flight_blocks(model=MODEL, layout=layout)[rank]
    return stage_memory(asked, stage, in_flight_blocks=in_flight).peak_allocated_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_pipelines_hold_less_since_2_15_and_nothing_else_does(name: str) -> None:
    layout = LAYOUTS[name]
    rank = layout.pp - 1
    older, newer = (peak_bytes(layout, rank=rank, torch=torch) for torch in ("2.14", "2.15"))
    assert newer < older if layout.pp > 1 else newer == older
    assert peak_bytes(layout, rank=rank, torch=None) == older
    assert peak_bytes(layout, rank=rank, torch="2.8") == older
