"""Uneven splits, as proposed and by hand, under every schedule: calls exactly, and peak memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.memory.peak import stage_memory
from fsdpplan.cost.schedule.stages import in_flight_blocks, layout_stage_blocks, pipeline_ranks
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.search.splits import stage_splits
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from tests.ground_truth.fsdp_step import as_messages, case_of, measured_step, summed, training_for
from tests.ground_truth.shapes import LLAMA_8B

SEQ_LEN = 2048

PIPE = Layout(
    compile=False,
    pp=2,
    dp_shard=4,
    schedule="1f1b",
    num_microbatches=6,
    reshard_after_forward="never",
    gradient_sync="last",
)
TWO = replace(PIPE, virtual_stages=2)
FOUR = replace(PIPE, pp=4, dp_shard=2)
SCHEDULES = {
    "1f1b of four": (8, FOUR),
    "1f1b, recomputed": (11, replace(FOUR, activation_checkpointing="full")),
    "1f1b, some recomputed": (
        11,
        replace(FOUR, activation_checkpointing="full", checkpoint_blocks=2),
    ),
    "interleaved": (8, replace(TWO, schedule="interleaved_1f1b")),
    "looped": (9, replace(TWO, schedule="looped_bfs")),
    "zero bubble": (8, replace(TWO, schedule="interleaved_zero_bubble")),
    "zbv": (12, replace(TWO, schedule="zbv")),
    "dualpipev": (12, replace(TWO, schedule="dualpipev")),
    "hsdp, tp": (
        9,
        replace(PIPE, dp_replicate=2, tp=2, sequence_parallel=True, loss_parallel=True),
    ),
}
"""By schedule: blocks of the model for which another split than the default one is proposed."""


def proposed(model: Model, layout: Layout) -> Layout:
    """With the first split that is proposed."""
    training = training_for(layout, seq_len=SEQ_LEN)
    split, *_ = stage_splits(case_of(model, training, layout))
    assert split != layout_stage_blocks(model=model, layout=layout)
    return replace(layout, stage_blocks=split)


CASES = [
    (name, rank)
    for name, (_, layout) in SCHEDULES.items()
    for rank in sorted({0, 1, layout.pp - 1})
]
BY_HAND = {
    "gpipe, growing": (replace(PIPE, schedule="gpipe", stage_blocks=(2, 5)), 0),
    "gpipe, shrinking": (replace(PIPE, schedule="gpipe", stage_blocks=(5, 2)), 1),
    "1f1b, shrinking": (replace(PIPE, stage_blocks=(6, 2)), 0),
    "1f1b, by room": (replace(FOUR, stage_blocks=(1, 2, 2, 4)), 3),
    "zbv, a light foot": (replace(TWO, schedule="zbv", stage_blocks=(3, 1, 1, 3)), 1),
    "dualpipev, a light head": (replace(TWO, schedule="dualpipev", stage_blocks=(2, 3, 2, 1)), 0),
    "zero bubble, growing": (
        replace(TWO, schedule="interleaved_zero_bubble", stage_blocks=(1, 2, 2, 3)),
        1,
    ),
    "1f1b, an embedding and a head alone": (replace(FOUR, stage_blocks=(0, 4, 4, 0)), 0),
    "1f1b, a head alone": (replace(FOUR, stage_blocks=(2, 3, 3, 0)), 3),
    "interleaved, ends alone": (
        replace(TWO, schedule="interleaved_1f1b", stage_blocks=(0, 4, 4, 0)),
        0,
    ),
    "interleaved, a head alone beside blocks": (
        replace(TWO, schedule="interleaved_1f1b", stage_blocks=(0, 4, 4, 0)),
        1,
    ),
    "zbv, ends alone": (replace(TWO, schedule="zbv", stage_blocks=(0, 4, 4, 0)), 0),
    "interleaved, shrinking": (
        replace(TWO, schedule="interleaved_1f1b", stage_blocks=(4, 2, 1, 1)),
        0,
    ),
}


TOLERANCE_FRACTION = 0.05


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("name", "pp_rank"), CASES)
def test_proposed_splits_call_and_need_what_was_predicted(name: str, pp_rank: int) -> None:
    layers, layout = SCHEDULES[name]
    model = replace(LLAMA_8B, layers=layers)
    require_as_predicted(model, proposed(model, layout), pp_rank)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("layout", "pp_rank"), BY_HAND.values(), ids=BY_HAND.keys())
def test_splits_of_any_shape_call_and_need_what_was_predicted(layout: Layout, pp_rank: int) -> None:
    model = replace(LLAMA_8B, layers=sum(layout.stage_blocks))
    require_as_predicted(model, layout, pp_rank)


def require_as_predicted(model: Model, layout: Layout, pp_rank: int) -> None:
    """Calls exactly; the peak within the tolerance of pipelines."""
    training = training_for(layout, seq_len=SEQ_LEN)
    measured = measured_step(model, training, layout, rank=pp_rank * (layout.world // layout.pp))
    stage = pipeline_ranks(model=model, layout=layout)[pp_rank]
    case = case_of(model, training, layout)
    assert as_messages(measured.rows) == summed(step_calls(case, stage))
    in_flight = in_flight_blocks(model=model, layout=layout)[pp_rank]
    peak = stage_memory(case, stage, in_flight_blocks=in_flight).peak_allocated_bytes
    assert peak == pytest.approx(measured.peak_bytes, rel=TOLERANCE_FRACTION)
