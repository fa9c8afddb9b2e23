"""Dual passes: what DualPipe hides of the exchanges among experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.play.pipeline import played_pipeline
from fsdpplan.cost.read.pipeline import pipeline_passes, side_by_side_seconds
from fsdpplan.cost.schedule.actions import PassOrder
from fsdpplan.cost.step.pipeline import PipelineStep
from fsdpplan.files.catalogue import load_model
from tests.cost.problems import Case, case

DUAL = {
    "pp": 4,
    "dp_shard": 32,
    "ep": 16,
    "schedule": "dualpipev",
    "virtual_stages": 2,
    "sharding": "zero1",
    "gradient_sync": "last",
    "num_microbatches": 24,
    "compile": False,
    "profile": "hgx-h800-ndr",
    "seq_len": 4096,
}
MIXTURE = replace(load_model("deepseek-v3"), layers=24)


def dual(runtime: str, **changes: object) -> Case:
    return case(MIXTURE, runtime=runtime, **{**DUAL, **changes})


def test_two_passes_take_the_longer_of_what_they_compute_and_exchange() -> None:
    device = dual("hai_llm").cluster.device
    both = {"device": device, "busy_multiprocessors": 0}
    assert side_by_side_seconds(computed=3.0, exchanged=2.0, **both) == 3.0
    assert side_by_side_seconds(computed=2.0, exchanged=3.0, **both) == 3.0
    # 132 multiprocessors, of which exchanges hold 22: what is computed takes 1.2 times as long
    held = {"device": device, "busy_multiprocessors": 22}
    assert device.multiprocessors == 132
    assert side_by_side_seconds(computed=3.0, exchanged=2.0, **held) == pytest.approx(3.6)
    assert side_by_side_seconds(computed=3.0, exchanged=0.1, **held) == pytest.approx(3.1)


def test_a_pipeline_of_pairs_is_as_long_as_what_they_take() -> None:
    """With many micro-batches a rank's step is that of its pairs."""
    pp, count = 4, 400
    stages = (1.0,) * (2 * pp)
    steps = {}
    for name, paired in (("alone", ()), ("beside", ((0.75, 1.5),) * (2 * pp))):
        step = PipelineStep(
            order=PassOrder("dualpipev", pp, count, 2),
            passes=tuple((one, 2 * one) for one in stages),
            weights=stages,
            paired=paired,
        )
        steps[name] = played_pipeline(step).total_seconds
    assert steps["beside"] / steps["alone"] == pytest.approx(0.75, rel=0.02)


def test_only_software_that_overlaps_passes_hides_exchanges() -> None:
    hides, waits = dual("hai_llm"), dual("megatron")
    assert pipeline_passes(waits).hidden_exchange_seconds == 0
    hidden = pipeline_passes(hides).hidden_exchange_seconds
    exposed = {
        one.runtime: sum(
            row.exposed_seconds for row in each.estimate.communication if row.axis == "ep"
        )
        for each in (hides, waits)
        for one in (each.training,)
    }
    assert hidden > 0
    assert exposed["hai_llm"] < 0.5 * exposed["megatron"]


def test_pairs_beat_a_schedule_that_waits_for_its_exchanges() -> None:
    asked, waits = dual("hai_llm"), dual("hai_llm", schedule="zbv")
    found = pipeline_passes(asked)
    assert asked.seconds < waits.seconds
    assert 0 < found.hidden_exchange_seconds < found.busy_seconds
