from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpplan.errors import LaunchError
from fsdpplan.run.smoke import smoke_layout, smoke_plan
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_estimate, make_plan


def estimate(**nouns: Any) -> Estimate:
    return make_estimate(tokens=nouns["training"].tokens_per_step, gpus=nouns["cluster"].gpus)


def smoke(plan: Plan) -> Plan:
    return smoke_plan(plan=plan, estimate=estimate)


def test_the_axes_stay_and_become_two() -> None:
    small = smoke(make_plan("cuda", nodes=16, num_microbatches=8, gradient_sync="last"))
    layout = small.layout
    assert (layout.dp_replicate, layout.dp_shard, layout.num_microbatches) == (2, 2, 2)
    assert layout.gradient_sync == "last"
    assert small.cluster.device.kind == "cpu"
    assert (small.cluster.gpus, small.cluster.nodes) == (4, 2)


def test_an_axis_of_one_stays_one() -> None:
    layout = smoke(make_plan("cuda", nodes=1, per_node=8)).layout
    assert (layout.dp_replicate, layout.dp_shard) == (1, 2)
    ddp = smoke(make_plan("cuda", nodes=8, per_node=1, sharding="ddp"))
    assert (ddp.layout.sharding, ddp.layout.world) == ("ddp", 2)


@pytest.mark.parametrize(("shard", "reshard", "small"), [(64, 8, (4, 2)), (8, 8, (2, 2))])
def test_resharding_to_groups_stays_smaller_than_the_shards(
    shard: int, reshard: int, small: tuple[int, int]
) -> None:
    layout = make_plan("cuda", per_node=shard, reshard_after_forward=reshard).layout
    shrunk = smoke_layout(layout)
    assert (shrunk.dp_shard, shrunk.reshard_after_forward) == small


@pytest.mark.parametrize("policy", ["none", "op", "full"])
def test_policies_stay(policy: str) -> None:
    plan = make_plan(
        "cuda", nodes=2, activation_checkpointing=policy, reshard_after_forward="never"
    )
    layout = smoke(plan).layout
    assert layout.activation_checkpointing == policy
    assert layout.reshard_after_forward == "never"


def test_grouped_heads_and_tied_embeddings_stay() -> None:
    plan = make_plan("cuda")
    model = replace(plan.model, kv_heads=1, tied_embeddings=True, qk_norm=True)
    small = smoke(replace(plan, model=model)).model
    assert small.kv_heads < small.heads
    assert small.tied_embeddings
    assert small.qk_norm


def test_a_layout_that_the_trainer_cannot_run_is_refused_by_name() -> None:
    plan = make_plan("cuda", nodes=1, per_node=8, dp_shard=2, tp=4)
    plan = replace(plan, estimate=replace(plan.estimate, runnable=False))
    with pytest.raises(LaunchError, match="tp 4"):
        smoke(plan)
