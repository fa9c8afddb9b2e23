from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.estimate import trainer_builds
from fsdpplan.errors import LaunchError
from fsdpplan.run.rehearse.smoke import SEQ_LEN, smoke_layout, smoke_plan
from fsdpplan.spec.model import Experts
from fsdpplan.spec.plan import Case, Estimate, Plan
from tests.emit.plans import make_estimate, make_plan


def estimate(case: Case) -> Estimate:
    return make_estimate(tokens=case.training.tokens_per_step, gpus=case.cluster.gpus)


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


def test_every_axis_stays_and_becomes_two() -> None:
    plan = make_plan(
        "cuda",
        nodes=16,
        per_node=8,
        pp=4,
        dp_replicate=2,
        dp_shard=2,
        cp=2,
        tp=4,
        schedule="1f1b",
        num_microbatches=8,
        gradient_sync="last",
        reshard_after_forward="never",
        stage_blocks=(9, 9, 8, 6),
        sequence_parallel=True,
        loss_parallel=True,
        async_tp=True,
    )
    small = smoke(plan)
    layout = small.layout
    assert (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp) == (2,) * 5
    assert (layout.schedule, layout.num_microbatches) == ("1f1b", 4)
    assert layout.stage_blocks == (2, 2)
    assert not layout.async_tp
    assert small.warnings == ("async_tp needs a GPU: the smoke run goes without",)


@pytest.mark.parametrize(("ep", "dp_shard", "small"), [(8, 8, (2, 2)), (4, 8, (2, 4))])
def test_experts_stay_apart_and_sharded_as_they_are(
    ep: int, dp_shard: int, small: tuple[int, int]
) -> None:
    mixture = Experts(experts=64, active=8, hidden=768, shared_hidden=512, dense_layers=3)
    plan = make_plan("cuda", per_node=8, dp_shard=dp_shard, ep=ep)
    plan = replace(plan, model=replace(plan.model, layers=8, experts=mixture))
    shrunk = smoke(plan)
    assert (shrunk.layout.ep, shrunk.layout.dp_shard) == small
    experts = shrunk.model.experts
    assert experts is not None
    assert experts.shared_hidden > 0
    assert 0 < experts.dense_layers < shrunk.model.layers


def test_a_pattern_of_blocks_stays_and_its_chunks_hold_a_sequence() -> None:
    plan = make_plan("cuda", per_node=8, dp_shard=8)
    mixture = Experts(experts=64, active=1, hidden=768, shared_hidden=512)
    changes = {"networks": "FE", "window_kind": "chunked", "sliding_window": 8192}
    plan = replace(plan, model=replace(plan.model, layers=8, experts=mixture, **changes))
    small = smoke(plan).model
    assert {network for _, network in small.block_kinds} == {"E", "F"}
    assert trainer_builds(model=small, seq_len=SEQ_LEN)


def test_blocks_that_the_trainer_lacks_are_refused() -> None:
    plan = make_plan("cuda", per_node=8)
    plan = replace(plan, model=replace(plan.model, attention_gate=True))
    with pytest.raises(LaunchError, match="cannot build a gate behind attention"):
        smoke(plan)


def test_number_formats_that_need_a_gpu_are_left_out_and_said() -> None:
    plan = make_plan("cuda")
    plan = replace(plan, training=replace(plan.training, precision="fp8"))
    small = smoke(plan)
    assert small.training.precision == "bf16"
    assert small.warnings == ("fp8 needs a GPU: the smoke run is in bf16",)


def test_a_runtime_that_is_not_fsdp2_is_refused() -> None:
    plan = make_plan("cuda", nodes=1, per_node=8)
    plan = replace(plan, estimate=replace(plan.estimate, runnable=False))
    with pytest.raises(LaunchError, match="--runtime fsdp2"):
        smoke(plan)
