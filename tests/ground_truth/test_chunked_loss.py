"""A loss in pieces: memory and collectives are those of the trainer's step under fake tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Precision, Training
from tests.ground_truth.fsdp_step import case_of, measured_step, summed, training_for
from tests.ground_truth.shapes import GPT2, LLAMA_8B

TOLERANCE_FRACTION = 0.003
PIPELINE_TOLERANCE_FRACTION = 0.05
"""As for pipelines with a whole loss."""

PIECES = Layout(dp_shard=8, micro_batch=8, loss_chunks=8, activation_checkpointing="full")
SPLIT = Layout(
    dp_shard=4,
    tp=4,
    micro_batch=4,
    sequence_parallel=True,
    loss_parallel=True,
    loss_chunks=2,
    activation_checkpointing="full",
)
PIPED = Layout(
    dp_shard=4,
    pp=2,
    micro_batch=4,
    num_microbatches=4,
    schedule="1f1b",
    reshard_after_forward="never",
    gradient_sync="last",
    loss_chunks=4,
    activation_checkpointing="full",
)
SHALLOW_8B = replace(LLAMA_8B, layers=4)

CASES: dict[str, tuple[Model, int, Layout, Precision]] = {
    "gpt-2, tied": (GPT2, 1024, PIECES, "bf16"),
    "fp32": (GPT2, 1024, PIECES, "fp32"),
    "fp16": (GPT2, 1024, PIECES, "fp16"),
    "uneven": (GPT2, 1000, replace(PIECES, loss_chunks=3), "bf16"),
    "accumulated": (
        GPT2,
        1024,
        replace(PIECES, num_microbatches=3, gradient_sync="last"),
        "bf16",
    ),
    "ddp": (GPT2, 1024, replace(PIECES, dp_shard=1, dp_replicate=8, sharding="ddp"), "bf16"),
    "8b": (SHALLOW_8B, 4096, replace(PIECES, loss_chunks=2, micro_batch=2), "bf16"),
    "8b, tp": (SHALLOW_8B, 4096, SPLIT, "bf16"),
    "8b, tp, small pieces": (SHALLOW_8B, 4096, replace(SPLIT, loss_chunks=24), "bf16"),
}

PIPELINES: dict[str, Layout] = {
    "1f1b": PIPED,
    "1f1b, tp": replace(PIPED, tp=2, sequence_parallel=True, loss_parallel=True),
    "interleaved": replace(PIPED, schedule="interleaved_1f1b", virtual_stages=2),
}


def predicted_peak_bytes(model: Model, training: Training, layout: Layout, *, rank: int) -> int:
    """Of a pipeline rank; what the trainer has on a CPU is not compiled."""
    stage = pipeline_ranks(model=model, layout=layout)[rank]
    in_flight = in_flight_blocks(model=model, layout=layout)[rank]
    eager = case_of(model, training, replace(layout, compile=False))
    return stage_memory(eager, stage, in_flight_blocks=in_flight).peak_allocated_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_peak_and_the_collectives_that_are_predicted(name: str) -> None:
    model, seq_len, layout, precision = CASES[name]
    training = training_for(layout, seq_len=seq_len, precision=precision)
    measured = measured_step(model, training, layout)
    predicted = predicted_peak_bytes(model, training, layout, rank=0)
    assert predicted == pytest.approx(measured.peak_bytes, rel=TOLERANCE_FRACTION)
    (stage,) = pipeline_ranks(model=model, layout=layout)
    calls = step_calls(case_of(model, training, layout), stage)
    assert dict(measured.rows) == summed(calls)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_last_stage_has_the_peak_that_is_predicted(name: str) -> None:
    layout = PIPELINES[name]
    training = training_for(layout, seq_len=2048)
    rank = layout.world // layout.pp
    measured = measured_step(SHALLOW_8B, training, layout, rank=rank)
    predicted = predicted_peak_bytes(SHALLOW_8B, training, layout, rank=1)
    assert predicted == pytest.approx(measured.peak_bytes, rel=PIPELINE_TOLERANCE_FRACTION)
