"""Pipeline schedules beside FSDP2: messages and collectives exactly, and peak memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.memory import stage_memory
from fsdpplan.cost.step import in_flight_blocks, pipeline_ranks
from fsdpplan.cost.traffic import fsdp_calls, pp_calls
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from tests.cost.clusters import cluster
from tests.ground_truth.fake_cluster import CollectiveRow, RowKey
from tests.ground_truth.fsdp_step import MeasuredStep, summed, training_for
from tests.ground_truth.pp_step import measured_pp_step
from tests.ground_truth.shapes import LLAMA_8B, LLAMA_SMALL_VOCAB

TOLERANCE_FRACTION = 0.05

BASE = Layout(
    pp=2,
    dp_shard=4,
    schedule="1f1b",
    num_microbatches=4,
    reshard_after_forward="never",
    gradient_sync="last",
)
RECOMPUTED = replace(BASE, pp=4, num_microbatches=6, activation_checkpointing="full")
SMALL_VOCAB = replace(LLAMA_SMALL_VOCAB, layers=8)
LARGE_VOCAB = replace(LLAMA_8B, layers=8)
CASES = {
    "gpipe, first": (SMALL_VOCAB, replace(BASE, schedule="gpipe"), 0),
    "gpipe, last": (SMALL_VOCAB, replace(BASE, schedule="gpipe"), 1),
    "1f1b, first": (SMALL_VOCAB, BASE, 0),
    "1f1b, last": (SMALL_VOCAB, BASE, 1),
    "interleaved, first": (
        SMALL_VOCAB,
        replace(BASE, schedule="interleaved_1f1b", virtual_stages=2),
        0,
    ),
    "interleaved, last": (
        SMALL_VOCAB,
        replace(BASE, schedule="interleaved_1f1b", virtual_stages=2),
        1,
    ),
    "recompute, second of four": (LARGE_VOCAB, RECOMPUTED, 1),
    "recompute, last of four": (LARGE_VOCAB, RECOMPUTED, 3),
}


@pytest.mark.parametrize(("model", "layout", "pp_rank"), CASES.values(), ids=CASES.keys())
def test_calls_and_peak_equal_those_of_torch(model: Model, layout: Layout, pp_rank: int) -> None:
    training = training_for(layout, seq_len=2048)
    measured = _measured(model, training, layout, pp_rank)
    stage = pipeline_ranks(model, layout)[pp_rank]

    arguments = {"model": model, "training": training, "layout": layout, "stage": stage}
    predicted = summed([*fsdp_calls(**arguments), *pp_calls(**arguments)])
    assert _as_messages(measured.rows) == predicted

    peak = stage_memory(
        cluster=cluster(gpus=8),
        in_flight_blocks=in_flight_blocks(model, layout)[pp_rank],
        **arguments,
    ).peak_allocated_bytes
    assert peak == pytest.approx(measured.peak_bytes, rel=TOLERANCE_FRACTION)


def _as_messages(rows: dict[RowKey, CollectiveRow]) -> dict[RowKey, CollectiveRow]:
    """A message is counted where it is sent."""
    return {
        ("send_recv" if collective == "send" else collective, *rest): row
        for (collective, *rest), row in rows.items()
        if collective != "recv"
    }


def _measured(model: Model, training: Training, layout: Layout, pp_rank: int) -> MeasuredStep:
    stages = layout.pp * layout.virtual_stages
    return measured_pp_step(
        model, training, layout, pp_rank=pp_rank, stage_blocks=[model.layers // stages] * stages
    )
