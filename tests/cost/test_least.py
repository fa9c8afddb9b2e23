"""Least: the bounds by which the search leaves out layouts are below every estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.least import queued_seconds, rounds
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.traffic.fsdp import fsdp_units
from fsdpplan.spec.model import Experts
from tests.cost.problems import SMALL, Case, case, cases

ROUNDING = 1 + 1e-9


def bound(asked: Case) -> float:
    """What queues on one communicator, as if nothing were computed; 0 without FSDP, and in a
    pipeline, where that is little."""
    layout = asked.layout
    if layout.sharding != "fsdp" or layout.pp > 1:
        return 0.0
    (stage,) = pipeline_ranks(model=asked.model, layout=layout)
    return queued_seconds(fsdp_units(asked, stage), rounds(layout))


@given(cases())
def test_no_estimate_is_below_a_bound(drawn: Case) -> None:
    assert bound(drawn) <= drawn.seconds * ROUNDING


@given(cases())
def test_the_bound_with_the_widest_units_holds_for_narrower_ones(drawn: Case) -> None:
    if drawn.layout.sharding != "fsdp":
        return
    narrow = drawn.with_layout(wrap_blocks=1)
    wide = drawn.with_layout(wrap_blocks=4)
    assert bound(wide) <= narrow.seconds * ROUNDING


MIXTURE = replace(SMALL, experts=Experts(experts=8, active=2, hidden=2048))
TP = {"sequence_parallel": True, "loss_parallel": True}
PP = {"reshard_after_forward": "never", "gradient_sync": "last", "num_microbatches": 8, "pp": 2}

MORE = [
    {"dp_shard": 16, "cp": 4},
    {"dp_shard": 8, "tp": 4, "async_tp": True, **TP},
    {"dp_shard": 16, "ep": 8, "model": MIXTURE},
    {"dp_shard": 4, "dp_replicate": 2, "ep": 4, "model": MIXTURE, "num_microbatches": 3},
    {"dp_shard": 8, "offload": "cpu"},
    {"dp_shard": 8, "precision": "fp8", "fp8_all_gather": True},
    {"dp_shard": 8, "sharding": "zero1", "gradient_sync": "last"},
    {"dp_shard": 8, "sharding": "zero2"},
    *(
        {"dp_shard": 2, "schedule": schedule, "virtual_stages": 2, "compile": False, **PP}
        for schedule in ("looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
    ),
    {"dp_shard": 2, "schedule": "1f1b", "stage_blocks": (7, 1), **PP},
]


@pytest.mark.parametrize("options", MORE, ids=str)
@settings(max_examples=6, deadline=None)
@given(seq_len=st.sampled_from([512, 4096]), micro_batch=st.sampled_from([1, 4]))
def test_nor_with_any_kind_of_parallelism(
    options: dict[str, object], seq_len: int, micro_batch: int
) -> None:
    asked = case(seq_len=seq_len, micro_batch=micro_batch, **options)  # type: ignore[arg-type]
    assert asked.problem is None
    assert bound(asked) <= asked.seconds * ROUNDING


def test_communication_bounds_where_compute_does_not() -> None:
    slow = case("llama-3.1-8b", profile="dgx-a100-80g-hdr1", dp_shard=128, seq_len=512)
    assert bound(slow) > 0.5 * slow.seconds
