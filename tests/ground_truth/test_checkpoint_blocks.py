"""Recomputation of the first blocks only: collectives exactly, and peak memory, by the trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Precision, ReduceDtype
from tests.ground_truth.fsdp_step import (
    as_messages,
    case_of,
    measured_step,
    predicted_peak_bytes,
    predicted_rows,
    summed,
    training_for,
)
from tests.ground_truth.shapes import GPT2, LLAMA_8B, LLAMA_70B, LLAMA_SMALL_VOCAB, ODD, QWEN3

SIX = replace(LLAMA_SMALL_VOCAB, layers=6)
EIGHT = replace(LLAMA_SMALL_VOCAB, layers=8)
SEVEN_ODD = replace(ODD, layers=7)


class Case(NamedTuple):
    """One step to compare."""

    model: Model
    seq_len: int
    layout: Layout
    precision: Precision = "bf16"
    reduce_dtype: ReduceDtype = "fp32"


def full(number: int, **parts: object) -> Layout:
    """A layout that recomputes its first `number` blocks."""
    given = {"dp_shard": 8, "activation_checkpointing": "full", **parts}
    return Layout(checkpoint_blocks=number, **given)  # type: ignore[arg-type]


def split(tp: int, layout: Layout) -> Layout:
    """The same with tensor and sequence parallelism."""
    return replace(layout, tp=tp, sequence_parallel=True, loss_parallel=True)


LAST = {"num_microbatches": 2, "gradient_sync": "last"}

FSDP_CASES = {
    "one of six": Case(SIX, 4096, full(1)),
    "two of six, large micro-batch": Case(SIX, 4096, full(2, micro_batch=4)),
    "three of six": Case(SIX, 2048, full(3)),
    "five of six": Case(SIX, 4096, full(5, micro_batch=2)),
    "five of six, blocks lead": Case(SIX, 256, full(5)),
    "operations of two": Case(SIX, 4096, full(2, activation_checkpointing="op")),
    "operations of four": Case(SIX, 2048, full(4, activation_checkpointing="op", micro_batch=2)),
    "attention of three": Case(SIX, 2048, full(3, activation_checkpointing="attention")),
    "8b": Case(LLAMA_8B, 4096, full(2, dp_shard=64)),
    "never": Case(SIX, 2048, full(4, reshard_after_forward="never")),
    "integer": Case(SIX, 2048, full(2, reshard_after_forward=2)),
    "hsdp": Case(SIX, 2048, full(3, dp_replicate=4, **LAST)),
    "reduce-scatter only, in bf16": Case(
        SIX,
        1024,
        full(3, dp_replicate=2, num_microbatches=3, gradient_sync="reduce_scatter_only"),
        reduce_dtype="bf16",
    ),
    "last, in fp32": Case(SIX, 1024, full(4, **LAST), precision="fp32"),
    "wrapped by two, at the border": Case(SIX, 2048, full(4, wrap_blocks=2)),
    "wrapped by two, across the border": Case(SIX, 4096, full(3, wrap_blocks=2)),
    "wrapped by three, across, large": Case(SIX, 4096, full(4, wrap_blocks=3, micro_batch=2)),
    "wrapped by four, the rest across": Case(SIX, 2048, full(5, wrap_blocks=4)),
    "wrapped whole": Case(SIX, 2048, full(2, wrap_blocks=6)),
    "odd": Case(SEVEN_ODD, 301, full(4, dp_shard=7, micro_batch=3)),
    "odd, wrapped, integer": Case(
        SEVEN_ODD, 1000, full(2, dp_shard=6, wrap_blocks=3, reshard_after_forward=3)
    ),
    "gpt-2": Case(GPT2, 1024, full(3, micro_batch=2)),
    "qwen 3": Case(QWEN3, 2048, full(2, micro_batch=2)),
    "loss in pieces": Case(QWEN3, 2048, full(4, micro_batch=4, loss_chunks=8)),
    "70b": Case(replace(LLAMA_70B, layers=8), 4096, full(5, dp_shard=64)),
}

DDP = {"sharding": "ddp", "dp_shard": 1, "dp_replicate": 2}
DDP_CASES = {
    "ddp, one": Case(SIX, 2048, full(1, **DDP)),
    "ddp, three": Case(SIX, 4096, full(3, **DDP)),
    "ddp, five": Case(SIX, 512, full(5, **DDP)),
    "ddp, operations": Case(SIX, 4096, full(4, activation_checkpointing="op", **DDP)),
    "ddp, accumulated": Case(SIX, 1024, full(2, **DDP, **LAST)),
    "ddp, fp32": Case(SIX, 2048, full(3, **DDP), precision="fp32"),
    "ddp, gpt-2": Case(GPT2, 1024, full(2, micro_batch=2, **DDP)),
}
TP_CASES = {
    "tp": Case(SIX, 4096, split(4, full(2))),
    "tp, operations": Case(SIX, 4096, split(4, full(3, activation_checkpointing="op"))),
    "tp, wrapped": Case(SIX, 2048, split(2, full(3, wrap_blocks=2, **LAST))),
    "tp, 70b": Case(replace(LLAMA_70B, layers=8), 4096, split(8, full(3, dp_shard=16))),
}
TOLERANCES = [(FSDP_CASES, 0.005), (DDP_CASES, 0.01), (TP_CASES, 0.01)]
FLAT = {name: (case, within) for cases, within in TOLERANCES for name, case in cases.items()}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("case", "tolerance"), FLAT.values(), ids=FLAT.keys())
def test_calls_and_peak_equal_those_of_the_trainer(case: Case, tolerance: float) -> None:
    training = training_for(
        case.layout,
        seq_len=case.seq_len,
        precision=case.precision,
        reduce_dtype=case.reduce_dtype,
    )
    measured = measured_step(case.model, training, case.layout)
    if case.layout.sharding == "fsdp":
        assert measured.rows == predicted_rows(case.model, training, case.layout)
    predicted = predicted_peak_bytes(case.model, training, case.layout)
    assert predicted == pytest.approx(measured.peak_bytes, rel=tolerance)


def piped(schedule: str, number: int, **parts: object) -> Layout:
    """A pipeline of two ranks whose stages recompute their first `number` blocks."""
    given = {
        "compile": False,
        "pp": 2,
        "dp_shard": 4,
        "schedule": schedule,
        "num_microbatches": 6,
        "reshard_after_forward": "never",
        "gradient_sync": "last",
        **parts,
    }
    return full(number, **given)


TWO = {"virtual_stages": 2}
PIPELINES = {
    "gpipe, first": (EIGHT, piped("gpipe", 2), 0),
    "gpipe, last": (EIGHT, piped("gpipe", 2), 1),
    "1f1b, first": (EIGHT, piped("1f1b", 3), 0),
    "1f1b, last": (EIGHT, piped("1f1b", 3), 1),
    "1f1b, hsdp": (EIGHT, piped("1f1b", 1, dp_replicate=2), 0),
    "1f1b, uneven": (EIGHT, piped("1f1b", 2, stage_blocks=(5, 3)), 0),
    "1f1b, uneven, last": (EIGHT, piped("1f1b", 4, stage_blocks=(5, 3)), 1),
    "1f1b, operations": (EIGHT, piped("1f1b", 2, activation_checkpointing="op"), 0),
    "1f1b, tp": (EIGHT, split(4, piped("1f1b", 2)), 0),
    "1f1b, tp, last": (EIGHT, split(4, piped("1f1b", 2)), 1),
    "interleaved, first": (EIGHT, piped("interleaved_1f1b", 1, **TWO), 0),
    "interleaved, last": (EIGHT, piped("interleaved_1f1b", 1, **TWO), 1),
    "interleaved, uneven": (
        EIGHT,
        piped("interleaved_1f1b", 1, stage_blocks=(3, 2, 1, 2), **TWO),
        0,
    ),
    "interleaved, uneven, wrapped": (
        EIGHT,
        piped("interleaved_1f1b", 2, stage_blocks=(4, 2, 1, 1), wrap_blocks=3, **TWO),
        0,
    ),
    "interleaved, tp": (EIGHT, split(4, piped("interleaved_1f1b", 1, **TWO)), 1),
    "looped, first": (EIGHT, piped("looped_bfs", 1, **TWO), 0),
    "looped, last": (EIGHT, piped("looped_bfs", 1, **TWO), 1),
    "zero bubble, attention": (
        EIGHT,
        piped("interleaved_zero_bubble", 1, activation_checkpointing="attention", **TWO),
        0,
    ),
    "70b, last of four": (
        replace(LLAMA_70B, layers=8),
        split(8, piped("1f1b", 1, pp=4, dp_shard=8)),
        3,
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("model", "layout", "pp_rank"), PIPELINES.values(), ids=PIPELINES.keys())
def test_calls_and_peak_of_a_pipeline_equal_those_of_torch(
    model: Model, layout: Layout, pp_rank: int
) -> None:
    training = training_for(layout, seq_len=2048)
    measured = measured_step(model, training, layout, rank=pp_rank * (layout.world // layout.pp))
    stage = pipeline_ranks(model=model, layout=layout)[pp_rank]
    case = case_of(model, training, layout)
    assert as_messages(measured.rows) == summed(step_calls(case, stage))
    in_flight = in_flight_blocks(model=model, layout=layout)[pp_rank]
    peak = stage_memory(case, stage, in_flight_blocks=in_flight).peak_allocated_bytes
    assert peak == pytest.approx(measured.peak_bytes, rel=0.05)
