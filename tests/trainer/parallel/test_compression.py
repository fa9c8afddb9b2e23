"""Gradients that DDP's hooks compress, on real gloo ranks: what is sent, and what is learned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdpplan.cost.model.shards import whole_model
from fsdpplan.cost.traffic.replica import replica_calls
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.support import require_runnable
from tests.ground_truth.fsdp_step import case_of
from tests.trainer import jobs, plans
from tests.trainer.compression_ranks import FIRST, KINDS, LAYOUT, MODEL


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("compression") / "results.json"
    return jobs.measured(2, "tests.trainer.compression_ranks:measure_compression", out)


def predicted_bytes(training: dict[str, Any]) -> list[int]:
    document = plans.plan_document(model=MODEL, training=training, **LAYOUT)
    model = Model(**document["model"])
    layout = Layout(sharding="ddp", dp_replicate=2, micro_batch=4)
    asked = Training(seq_len=24, global_batch=8, precision="fp32", **training)
    calls = replica_calls(case_of(model, asked, layout), whole_model(model))
    return sorted(call.call_bytes for call in calls for _ in range(call.count))


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["bf16", "powersgd"])
def test_ddp_sends_what_is_predicted(results: dict[str, Any], name: str) -> None:
    assert sorted(results[name]["sent"][-1]) == predicted_bytes(KINDS[name])


@pytest.mark.gloo
def test_the_first_steps_of_powersgd_are_sent_whole(results: dict[str, Any]) -> None:
    sent = [sum(step) for step in results["powersgd"]["sent"]]
    assert sent[:FIRST] == [sum(step) for step in results["powersgd_whole"]["sent"]][:FIRST]
    assert sent[-1] < sent[0] / 2
    losses = results["powersgd"]["losses"]
    assert losses[: FIRST + 1] == pytest.approx(results["none"]["losses"][: FIRST + 1], abs=5e-6)
    assert losses[-1] != pytest.approx(results["none"]["losses"][-1], abs=5e-6)


@pytest.mark.gloo
@pytest.mark.parametrize("name", KINDS)
def test_compressed_gradients_train(results: dict[str, Any], name: str) -> None:
    losses = results[name]["losses"]
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(results["none"]["losses"], abs=0.1)


@pytest.mark.parametrize(
    ("training", "layout", "words"),
    [
        (KINDS["powersgd"], {"dp_shard": 2}, "with sharding fsdp"),
        (KINDS["bf16"], {"dp_shard": 2}, "with sharding fsdp"),
        ({"gradient_compression": "topk"}, LAYOUT, "none, bf16 and powersgd:1:1000 work"),
        (
            KINDS["powersgd"],
            {**LAYOUT, "num_microbatches": 2, "gradient_sync": "every"},
            "last works",
        ),
        (KINDS["powersgd"] | {"precision": "fp16"}, LAYOUT, "bf16 and fp32 work"),
    ],
)
def test_what_is_not_compressed_is_refused(
    training: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    plan = parse_plan(json.dumps(plans.plan_document(training=training, **layout)))
    with pytest.raises(TrainerError, match=words):
        require_runnable(plan)
