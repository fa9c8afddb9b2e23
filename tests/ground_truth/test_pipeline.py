"""Pipeline schedules beside FSDP2 and TP: messages and collectives exactly, and peak memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import in_flight_blocks, pipeline_ranks
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from tests.ground_truth.fsdp_step import as_messages, case_of, measured_step, summed, training_for
from tests.ground_truth.shapes import LLAMA_8B, LLAMA_70B, LLAMA_SMALL_VOCAB

TOLERANCE_FRACTION = 0.05

BASE = Layout(
    compile=False,
    pp=2,
    dp_shard=4,
    schedule="1f1b",
    num_microbatches=6,
    reshard_after_forward="never",
    gradient_sync="last",
)
TWO = replace(BASE, virtual_stages=2)
WHOLE = replace(BASE, dp_shard=1, sharding="ddp", reshard_after_forward="always")
RECOMPUTED = replace(BASE, pp=4, activation_checkpointing="full")
SMALL_VOCAB = replace(LLAMA_SMALL_VOCAB, layers=8)
LARGE_VOCAB = replace(LLAMA_8B, layers=8)
SEVENTY = replace(LLAMA_70B, layers=8)
GELU = replace(load_model("megatron-76b"), layers=8, hidden=5120, heads=40, kv_heads=40)
TIED = replace(load_model("qwen3-4b"), layers=8)


def _tensor_parallel(layout: Layout, tp: int) -> Layout:
    return replace(layout, tp=tp, sequence_parallel=True, loss_parallel=True)


CASES = {
    "gpipe, first": (SMALL_VOCAB, replace(BASE, schedule="gpipe"), 0),
    "gpipe, last": (SMALL_VOCAB, replace(BASE, schedule="gpipe"), 1),
    "1f1b, first": (SMALL_VOCAB, BASE, 0),
    "1f1b, last": (SMALL_VOCAB, BASE, 1),
    "1f1b, hsdp": (SMALL_VOCAB, replace(BASE, dp_replicate=2), 0),
    "1f1b, tp, first": (LARGE_VOCAB, _tensor_parallel(BASE, 4), 0),
    "1f1b, tp, last": (LARGE_VOCAB, _tensor_parallel(BASE, 4), 1),
    "1f1b, uneven": (SMALL_VOCAB, replace(BASE, stage_blocks=(5, 3)), 1),
    "1f1b, a head alone": (SMALL_VOCAB, replace(BASE, stage_blocks=(8, 0)), 1),
    "interleaved, first": (SMALL_VOCAB, replace(TWO, schedule="interleaved_1f1b"), 0),
    "interleaved, last": (SMALL_VOCAB, replace(TWO, schedule="interleaved_1f1b"), 1),
    "interleaved, wrapped": (
        SMALL_VOCAB,
        replace(TWO, schedule="interleaved_1f1b", wrap_blocks=3, stage_blocks=(4, 2, 1, 1)),
        0,
    ),
    "interleaved, four stages a rank": (
        SMALL_VOCAB,
        replace(BASE, schedule="interleaved_1f1b", virtual_stages=4),
        0,
    ),
    "interleaved, tp, recompute": (
        SMALL_VOCAB,
        _tensor_parallel(
            replace(TWO, schedule="interleaved_1f1b", activation_checkpointing="full"), 4
        ),
        1,
    ),
    "looped, first": (SMALL_VOCAB, replace(TWO, schedule="looped_bfs"), 0),
    "looped, last": (SMALL_VOCAB, replace(TWO, schedule="looped_bfs"), 1),
    "zero bubble, first": (SMALL_VOCAB, replace(TWO, schedule="interleaved_zero_bubble"), 0),
    "zero bubble, last": (SMALL_VOCAB, replace(TWO, schedule="interleaved_zero_bubble"), 1),
    "zero bubble, one stage, tp": (
        SMALL_VOCAB,
        _tensor_parallel(replace(BASE, schedule="interleaved_zero_bubble"), 4),
        0,
    ),
    "zero bubble, tp, last": (
        SMALL_VOCAB,
        _tensor_parallel(replace(TWO, schedule="interleaved_zero_bubble"), 4),
        1,
    ),
    "zero bubble, large vocabulary, tp, last": (
        LARGE_VOCAB,
        _tensor_parallel(replace(TWO, schedule="interleaved_zero_bubble"), 2),
        1,
    ),
    "zero bubble, gelu and biases, four stages a rank": (
        GELU,
        _tensor_parallel(
            replace(
                BASE,
                schedule="interleaved_zero_bubble",
                virtual_stages=4,
                num_microbatches=2,
                micro_batch=4,
            ),
            4,
        ),
        0,
    ),
    "zero bubble, four stages a rank, tp": (
        SMALL_VOCAB,
        _tensor_parallel(replace(BASE, schedule="interleaved_zero_bubble", virtual_stages=4), 4),
        0,
    ),
    "interleaved, four stages a rank, tp": (
        SMALL_VOCAB,
        _tensor_parallel(replace(BASE, schedule="interleaved_1f1b", virtual_stages=4), 4),
        0,
    ),
    "zbv, first": (SMALL_VOCAB, replace(TWO, schedule="zbv"), 0),
    "zbv, last": (SMALL_VOCAB, replace(TWO, schedule="zbv"), 1),
    "zbv, hsdp, tp": (
        SMALL_VOCAB,
        _tensor_parallel(replace(TWO, schedule="zbv", dp_replicate=2), 4),
        0,
    ),
    "zbv, second of four": (
        SMALL_VOCAB,
        replace(TWO, schedule="zbv", pp=4, num_microbatches=10, stage_blocks=(1,) * 8),
        1,
    ),
    "zbv, a table at both ends": (TIED, replace(TWO, schedule="zbv"), 0),
    **{
        f"{schedule}, recompute, {place}": (
            SMALL_VOCAB,
            _tensor_parallel(
                replace(TWO, schedule=schedule, activation_checkpointing="full"),
                tp,
            )
            if tp > 1
            else replace(TWO, schedule=schedule, activation_checkpointing="full"),
            rank,
        )
        for schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
        for place, tp, rank in (("first", 1, 0), ("last", 1, 1), ("tp, last", 4, 1))
    },
    "dualpipev, first": (SMALL_VOCAB, replace(TWO, schedule="dualpipev"), 0),
    "dualpipev, last": (SMALL_VOCAB, replace(TWO, schedule="dualpipev"), 1),
    "dualpipev, tp, last of four": (
        SMALL_VOCAB,
        _tensor_parallel(
            replace(TWO, schedule="dualpipev", pp=4, num_microbatches=10, stage_blocks=(1,) * 8),
            2,
        ),
        3,
    ),
    "recompute, second of four": (LARGE_VOCAB, RECOMPUTED, 1),
    "recompute, last of four": (LARGE_VOCAB, RECOMPUTED, 3),
    "whole copies, first": (SMALL_VOCAB, WHOLE, 0),
    "whole copies, last": (SMALL_VOCAB, WHOLE, 1),
    "whole copies, replicas, first of four": (SMALL_VOCAB, replace(WHOLE, pp=4, dp_replicate=2), 0),
    "whole copies, tp, first": (LARGE_VOCAB, _tensor_parallel(WHOLE, 2), 0),
    "whole copies, tp, last": (LARGE_VOCAB, _tensor_parallel(WHOLE, 2), 1),
    "whole copies, tp, interleaved, first": (
        LARGE_VOCAB,
        _tensor_parallel(replace(WHOLE, virtual_stages=2, schedule="interleaved_1f1b"), 2),
        0,
    ),
    "whole copies, tp, recompute, first of four": (
        LARGE_VOCAB,
        _tensor_parallel(replace(WHOLE, pp=4, activation_checkpointing="full"), 2),
        0,
    ),
    "whole copies, interleaved, last": (
        SMALL_VOCAB,
        replace(WHOLE, virtual_stages=2, schedule="interleaved_1f1b"),
        1,
    ),
    "whole copies, zero bubble, first": (
        SMALL_VOCAB,
        replace(WHOLE, virtual_stages=2, schedule="interleaved_zero_bubble"),
        0,
    ),
    "whole copies, zbv, first": (
        SMALL_VOCAB,
        replace(WHOLE, virtual_stages=2, schedule="zbv"),
        0,
    ),
    "whole copies, some blocks recomputed, first": (
        SMALL_VOCAB,
        replace(WHOLE, activation_checkpointing="full", checkpoint_blocks=2),
        0,
    ),
    "70b, 1f1b, first of four": (
        SEVENTY,
        _tensor_parallel(replace(BASE, pp=4, dp_shard=8), 8),
        0,
    ),
    "70b, interleaved, hsdp, last of four": (
        SEVENTY,
        _tensor_parallel(
            replace(
                TWO,
                pp=4,
                dp_replicate=4,
                dp_shard=8,
                schedule="interleaved_1f1b",
                num_microbatches=8,
                stage_blocks=(1,) * 8,
            ),
            8,
        ),
        3,
    ),
    "70b, 1,024 ranks": (
        replace(LLAMA_70B, layers=32),
        _tensor_parallel(
            replace(BASE, pp=8, dp_shard=16, num_microbatches=8, activation_checkpointing="full"),
            8,
        ),
        7,
    ),
}


FEW = {
    f"{name}, {number} micro-batches": (model, replace(layout, num_microbatches=number), pp_rank)
    for name, number in (
        ("gpipe, first", 2),
        ("gpipe, last", 2),
        ("1f1b, first", 2),
        ("1f1b, tp, first", 4),
        ("1f1b, a head alone", 2),
        ("interleaved, first", 2),
        ("interleaved, wrapped", 4),
        ("interleaved, four stages a rank", 4),
        ("interleaved, tp, recompute", 3),
        ("looped, first", 2),
        ("looped, last", 3),
        ("zero bubble, last", 4),
        ("zero bubble, tp, last", 4),
        ("zero bubble, large vocabulary, tp, last", 2),
        ("zero bubble, four stages a rank, tp", 2),
        ("interleaved, four stages a rank, tp", 2),
        ("zbv, first", 2),
        ("zbv, hsdp, tp", 2),
        ("zbv, second of four", 4),
        ("dualpipev, first", 4),
        ("recompute, second of four", 4),
        ("70b, 1f1b, first of four", 4),
        ("70b, interleaved, hsdp, last of four", 4),
        ("70b, interleaved, hsdp, last of four", 2),
    )
    for model, layout, pp_rank in (CASES[name],)
}
"""No more micro-batches than stages, or fewer: nothing is steady then."""

ALL = CASES | FEW


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("model", "layout", "pp_rank"), ALL.values(), ids=ALL.keys())
def test_calls_and_peak_equal_those_of_torch(model: Model, layout: Layout, pp_rank: int) -> None:
    require_equal(model, layout, pp_rank)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("model", "layout", "pp_rank"), CASES.values(), ids=CASES.keys())
def test_calls_and_peak_with_bf16_parameters_equal_those_of_torch(
    model: Model, layout: Layout, pp_rank: int, reduce_dtype: str
) -> None:
    require_equal(model, layout, pp_rank, param_dtype="bf16", reduce_dtype=reduce_dtype)


FREED = replace(BASE, reshard_after_forward="always")
FREED_TWO = replace(FREED, schedule="interleaved_1f1b", virtual_stages=2)
SIXTEEN = replace(LLAMA_SMALL_VOCAB, layers=16)

RESHARDED = {
    "1f1b, first": (FREED, 0),
    "1f1b, last": (FREED, 1),
    "1f1b, recompute, last": (replace(FREED, activation_checkpointing="full"), 1),
    "1f1b, hsdp, tp": (_tensor_parallel(replace(FREED, dp_replicate=2), 4), 0),
    "1f1b, wrapped": (replace(FREED, wrap_blocks=3), 0),
    "1f1b, 2 micro-batches": (replace(FREED, num_microbatches=2), 0),
    "gpipe": (replace(FREED, schedule="gpipe"), 0),
    "interleaved, first": (FREED_TWO, 0),
    "interleaved, last": (FREED_TWO, 1),
    "interleaved, three stages a rank": (replace(FREED_TWO, virtual_stages=3), 0),
    "looped": (replace(FREED_TWO, schedule="looped_bfs"), 0),
}
"""What the trainer refuses, and other programs run under the same schedules: blocks are resharded
behind each forward pass."""


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("layout", "pp_rank"), RESHARDED.values(), ids=RESHARDED.keys())
def test_calls_and_peak_of_stages_that_are_resharded_equal_those_of_torch(
    layout: Layout, pp_rank: int
) -> None:
    require_equal(SIXTEEN, layout, pp_rank)


def require_equal(model: Model, layout: Layout, pp_rank: int, **settings: str) -> None:
    """Collectives exactly, and the peak within the tolerance."""
    training = training_for(layout, seq_len=2048, **settings)
    rank = pp_rank * (layout.world // layout.pp)
    measured = measured_step(model, training, layout, rank=rank)
    stage = pipeline_ranks(model=model, layout=layout)[pp_rank]

    case = case_of(model, training, layout)
    assert as_messages(measured.rows) == summed(step_calls(case, stage))

    in_flight = in_flight_blocks(model=model, layout=layout)[pp_rank]
    peak = stage_memory(case, stage, in_flight_blocks=in_flight).peak_allocated_bytes
    assert peak == pytest.approx(measured.peak_bytes, rel=TOLERANCE_FRACTION)


def test_recomputation_under_a_split_backward_pass_repeats_its_collectives_once() -> None:
    """Not once for each parameter of a block, as torch's checkpoint would."""
    layout = _tensor_parallel(
        replace(TWO, schedule="interleaved_zero_bubble", stage_blocks=(1,) * 4), 2
    )
    rows = []
    for checkpointing in ("none", "full"):
        recomputed = replace(layout, activation_checkpointing=checkpointing)
        training = training_for(recomputed, seq_len=256)
        model = replace(SMALL_VOCAB, layers=4)
        last_stage = recomputed.world // 2
        rows.append(measured_step(model, training, recomputed, rank=last_stage).rows)
    plain, full = (row["all_gather", "tp", 2, "bf16"].count for row in rows)
    blocks, gathers = 2, 2
    assert full - plain == layout.num_microbatches * blocks * gathers
