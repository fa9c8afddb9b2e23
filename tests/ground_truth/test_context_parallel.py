"""Context parallelism in pipelines, as rehearsals stand in for a ring: collectives and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from tests.ground_truth.fsdp_step import as_messages, case_of, measured_step, summed, training_for
from tests.ground_truth.shapes import SMALL

TOLERANCE_FRACTION = 0.05

PIPED = Layout(
    compile=False,
    dp_shard=2,
    cp=8,
    pp=2,
    schedule="1f1b",
    num_microbatches=4,
    reshard_after_forward="never",
    gradient_sync="last",
)
TWICE = replace(PIPED, schedule="interleaved_1f1b", virtual_stages=2)
SEVENS = replace(SMALL, hidden=1792, ffn_hidden=4736, heads=28, kv_heads=4)
"""Of whose heads 8 ranks have no equal parts."""
CASES = {
    "no equal heads": (SEVENS, PIPED, 0),
    "no equal heads, pieces of the loss": (SEVENS, replace(TWICE, loss_chunks=2), 1),
    "split heads": (
        replace(SMALL, kv_heads=8),
        replace(PIPED, cp=4, tp=4, sequence_parallel=True, loss_parallel=True),
        1,
    ),
    "traded heads": (SMALL, replace(PIPED, cp=4, cp_attention="ulysses"), 0),
    "traded heads, fewer keys than ranks": (
        replace(SEVENS, hidden=2048, heads=32),
        replace(PIPED, cp_attention="ulysses", activation_checkpointing="full"),
        1,
    ),
    "a split backward pass": (SEVENS, replace(TWICE, schedule="interleaved_zero_bubble"), 0),
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("model", "layout", "pp_rank"), CASES.values(), ids=CASES.keys())
def test_calls_and_peak_equal_those_of_torch(model: Model, layout: Layout, pp_rank: int) -> None:
    training = training_for(layout, seq_len=16384)
    measured = measured_step(model, training, layout, rank=pp_rank * (layout.world // layout.pp))
    stage = pipeline_ranks(model=model, layout=layout)[pp_rank]

    on_cpus = case_of(model, training, layout, profile="cpu")
    assert as_messages(measured.rows) == summed(step_calls(on_cpus, stage))

    case = case_of(model, training, layout)
    if layout.cp_attention == "ulysses":
        assert step_calls(case, stage) == step_calls(on_cpus, stage)
    in_flight = in_flight_blocks(model=model, layout=layout)[pp_rank]
    peak = stage_memory(case, stage, in_flight_blocks=in_flight).peak_allocated_bytes
    assert peak == pytest.approx(measured.peak_bytes, rel=TOLERANCE_FRACTION)


ALONE = Layout(compile=False, cp=8, cp_attention="ulysses")
SIX = replace(SMALL, hidden=768, heads=6, kv_heads=6, head_dim=128)
"""Heads that are made up to eight, with keys of their own."""
WINDOWS = replace(SIX, kv_heads=2, sliding_window=512, full_attention_every=2)
TRADED = {
    "divided": (SMALL, ALONE),
    "repeated keys": (SEVENS, ALONE),
    "repeated keys, made again": (SEVENS, replace(ALONE, activation_checkpointing="full")),
    "added heads": (SIX, replace(ALONE, cp=4)),
    "windows": (WINDOWS, replace(ALONE, cp=4)),
    "added heads, half made again": (SIX, replace(ALONE, cp=4, activation_checkpointing="op")),
}


@pytest.mark.parametrize(("model", "layout"), TRADED.values(), ids=TRADED.keys())
def test_heads_that_ranks_do_not_divide_are_held_as_they_are_sent(
    model: Model, layout: Layout
) -> None:
    training = training_for(layout, seq_len=16384)
    measured = measured_step(model, training, layout, rank=0).peak_bytes
    case = case_of(model, training, layout)
    peak = stage_memory(case, whole_model(model), in_flight_blocks=model.layers)
    assert peak.peak_allocated_bytes == pytest.approx(measured, rel=0.001)
