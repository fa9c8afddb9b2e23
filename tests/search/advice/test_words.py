"""Words: layouts as a person would say them."""

from __future__ import annotations

import pytest
from hypothesis import given

from fsdpplan.search.advice.words import degrees, describe, differences, name, policy
from tests.cost.problems import Case, case, cases

TP = {"sequence_parallel": True, "loss_parallel": True}
PP = {"gradient_sync": "last", "num_microbatches": 8, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("layout", "family", "sentence"),
    [
        ({"sharding": "ddp"}, "one GPU", "one GPU: nothing to spread"),
        (
            {"sharding": "ddp", "dp_replicate": 8},
            "DDP",
            "DDP: a whole copy on each of the 8 GPUs of a node",
        ),
        (
            {"sharding": "ddp", "dp_replicate": 128},
            "DDP",
            "DDP: a whole copy on each of the 128 GPUs",
        ),
        ({"dp_shard": 64}, "FSDP", "FSDP: shard over all 64 GPUs"),
        ({"dp_shard": 8}, "FSDP", "FSDP: shard over the 8 GPUs of a node"),
        (
            {"dp_replicate": 16, "dp_shard": 8},
            "HSDP",
            "HSDP: shard over the 8 GPUs of a node, replicate over 16 nodes",
        ),
        (
            {"tp": 8, "dp_shard": 8, **TP},
            "TP + FSDP",
            "FSDP: shard over 8 nodes, tensor parallel over the 8 GPUs of a node",
        ),
        (
            {"pp": 4, "dp_shard": 8, "reshard_after_forward": "never", **PP},
            "PP + FSDP",
            "FSDP: shard over the 8 GPUs of a node, pipeline of 4 stages (1F1B)",
        ),
        (
            {"cp": 8, "dp_shard": 8},
            "CP + FSDP",
            "FSDP: shard over all 64 GPUs, context parallel over the 8 GPUs of a node",
        ),
        (
            {"ep": 8, "dp_shard": 64},
            "EP + FSDP",
            "FSDP: shard over all 64 GPUs, experts over the 8 GPUs of a node",
        ),
        (
            {"tp": 4, "dp_shard": 4, "ep": 2, "experts_over_tp": True, "sharding": "zero1", **TP},
            "TP + EP + ZeRO-1",
            "ZeRO-1: optimizer state sharded over 4 GPUs across nodes, tensor parallel over 4 GPUs "
            "of a node, whole experts over the 8 GPUs of a node",
        ),
        (
            {"tp": 8, "dp_shard": 8, "async_tp": True, **TP},
            "TP + FSDP",
            "FSDP: shard over 8 nodes, tensor parallel, overlapped, over the 8 GPUs of a node",
        ),
        (
            {"dp_shard": 8, "dp_replicate": 2, "sharding": "zero1"},
            "ZeRO-1",
            "ZeRO-1: optimizer state sharded over the 8 GPUs of a node, replicated over 2 nodes",
        ),
        (
            {"dp_shard": 64, "sharding": "zero2"},
            "ZeRO-2",
            "ZeRO-2: gradients and optimizer state sharded over all 64 GPUs",
        ),
    ],
)
def test_what_a_layout_is_called(layout: dict[str, object], family: str, sentence: str) -> None:
    asked = case(**layout)  # type: ignore[arg-type]
    assert name(asked.layout) == family
    assert describe(asked.layout, asked.cluster) == sentence


def test_degrees_are_those_that_are_not_one() -> None:
    assert degrees(case(sharding="ddp").layout) == "one rank"
    assert degrees(case(dp_replicate=2, dp_shard=4, cp=2).layout) == (
        "dp_replicate 2 x dp_shard 4 x cp 2"
    )
    assert degrees(case(dp_shard=64, ep=8).layout) == "dp_shard 64, ep 8"
    spread = case(tp=2, dp_shard=4, ep=4, experts_over_tp=True, sharding="zero1")
    assert degrees(spread.layout) == "dp_shard 4 x tp 2, ep 4 x tp 2"


def test_differences_are_policies_in_words() -> None:
    one = case(sharding="ddp", dp_replicate=2).layout
    other = case(
        sharding="ddp", dp_replicate=2, ddp_bucket_bytes=100 * 2**20, compile=False, micro_batch=2
    ).layout
    assert differences(other, one) == ["bucket 100 MiB", "micro-batch 2", "compile off"]
    assert differences(one, one) == []


@pytest.mark.parametrize(("kind", "words"), [("ring", "ring"), ("ulysses", "Ulysses")])
def test_attention_over_parts_of_a_sequence_is_named(kind: str, words: str) -> None:
    shared = case(dp_shard=4, cp=2, cp_attention=kind).layout
    assert f", {words} attention," in policy(shared)
    assert "attention," not in policy(case(dp_shard=8, cp_attention=kind).layout)


def test_processes_are_not_gpus() -> None:
    local = case(profile="cpu", dp_replicate=2, dp_shard=2)
    assert "processes" in describe(local.layout, local.cluster)


@given(cases())
def test_every_axis_in_use_is_named(drawn: Case) -> None:
    layout = drawn.layout
    said = describe(layout, drawn.cluster)
    assert ("tensor parallel" in said) == (layout.tp > 1)
    assert ("pipeline" in said) == (layout.pp > 1)
    assert ("shard over" in said) == (layout.shard_ranks > 1)
    assert ("HSDP" in name(layout)) == (layout.shard_ranks > 1 and layout.dp_replicate > 1)
